"""Placement of leaves on a mesh, and its cost: pure decisions over sizes, without JAX."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
