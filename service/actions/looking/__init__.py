"""Views of steps and runs: leaves, values, diffs, placement on a mesh, usage."""
