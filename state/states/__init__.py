"""Training states and their optimizers, and how they are saved to checkpoints and loaded."""
