"""Import of checkpoints that plain Orbax saved: a run lists them; they are not changed."""
