"""Commands that read runs and checkpoints, through a control plane or from a store."""
