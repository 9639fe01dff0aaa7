"""The client that is awaited, of which `scripts/sync_client.py` makes the one that waits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
