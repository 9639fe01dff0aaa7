"""Deletion of steps, retention, and garbage collection."""
