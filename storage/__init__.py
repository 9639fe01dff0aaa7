"""Runs and checkpoints in an object store: run protocol, array format, reading, imports.

No module here imports JAX. The Orbax checkpointer that training uses is in
`cairn.state.checkpointing`.
"""
