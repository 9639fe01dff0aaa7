"""Reads of leaves: target descriptions, this process's reads, and shared reads."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
