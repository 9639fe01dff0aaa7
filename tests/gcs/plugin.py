"""Pytest fixtures of the GCS double."""
