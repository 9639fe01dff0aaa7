"""Store checks: a probe, before the first write, of what the run protocol requires of a store."""
