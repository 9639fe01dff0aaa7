"""Runs and checkpoints in an object store: run protocol, array format, reading, imports.

Nothing here loads JAX. The Orbax checkpointer that training uses is in `cairn.state.checkpointing`.
"""
