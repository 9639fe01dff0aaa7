"""The commands that look into runs and checkpoints, by a control plane or in a store."""
