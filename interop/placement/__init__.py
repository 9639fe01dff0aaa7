"""Placement of leaves on a mesh, and its cost; pure functions of sizes."""
