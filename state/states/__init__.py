"""Training states and their optimizers: what a checkpoint holds, and how it comes back."""
