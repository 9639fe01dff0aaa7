"""Sharding of every leaf: meshes, partition rules, and putting leaves on devices."""
