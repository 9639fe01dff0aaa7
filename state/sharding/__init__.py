"""Sharding of every leaf: meshes, partition rules, and putting leaves on devices."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
