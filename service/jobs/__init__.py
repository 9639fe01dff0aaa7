"""Durable jobs, one kind a file, from convert to garbage collection; `engine` runs them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
