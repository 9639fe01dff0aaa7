"""The pages of one run: its steps and curves, aliases, family, and what it takes."""
