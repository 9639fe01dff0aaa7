"""Listing, in a run, the checkpoints that plain Orbax has saved: each read once, none changed."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
