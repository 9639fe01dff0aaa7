"""Listing, in a run, the checkpoints that plain Orbax has saved: each read once, none changed."""
