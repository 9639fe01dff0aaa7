"""Protocol of a run, and its only owner: who may write, which steps count, what may be deleted."""
