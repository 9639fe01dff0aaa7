"""Bytes and small objects in any store: addresses, conditional writes, files, checksums."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
