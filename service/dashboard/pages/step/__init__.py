"""The pages of one step: what it is, its tensors, configuration, files, and what a mesh needs."""
