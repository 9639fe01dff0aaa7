"""Actions on runs, checkpoints and jobs, as plain functions that the routes call."""
