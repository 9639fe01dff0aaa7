"""The asynchronous client; `scripts/sync_client.py` generates the synchronous one from it."""
