"""`cairn doctor`: checks an installation, its settings, and the stores and databases they name."""
