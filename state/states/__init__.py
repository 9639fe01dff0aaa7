"""Saving and loading of training states: what a checkpoint holds, and how it comes back."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
