"""Leaves read back: what each asks for, what this process reads, and what others read for it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
