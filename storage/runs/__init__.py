"""The protocol of a run: who may write, which steps count, what may be deleted.

No other package changes a run's records.
"""
