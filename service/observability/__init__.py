"""Metrics, structured logs and traces of a server and a worker."""
