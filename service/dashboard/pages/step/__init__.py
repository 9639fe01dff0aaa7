"""Pages of a step: overview, tensors, configuration, files, and the plan for a mesh."""
