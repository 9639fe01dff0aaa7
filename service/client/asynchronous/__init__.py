"""The asynchronous client; `scripts/sync_client.py` generates the synchronous one from it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
