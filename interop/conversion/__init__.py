"""Rules between our leaves and another format's tensors, for both directions, without JAX."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
