"""Agreement between a job's processes: exchanged values, stragglers, failures.

Imports JAX; in a job of one process all is local.
"""
