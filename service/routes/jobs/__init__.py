"""Routes that start jobs on checkpoints and runs."""
