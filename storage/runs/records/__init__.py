"""Records of a run, one kind per file: names, fields, and how they are read and written."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
