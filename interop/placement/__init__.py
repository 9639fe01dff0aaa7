"""Placement of leaves on a mesh, and its cost: pure decisions over sizes."""
