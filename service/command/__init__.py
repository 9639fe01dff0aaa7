"""Command line of Cairn: the `cairn` command, its output and its processes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
