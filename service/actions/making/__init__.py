"""Creation of runs and roots, import of Orbax folders, and takeover of a run's writer."""
