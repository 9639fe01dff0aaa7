"""Agreement between a job's processes: exchanged values, stragglers, failures.

Imports JAX. In a job of one process, nothing is exchanged.
"""
