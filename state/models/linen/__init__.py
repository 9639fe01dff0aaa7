"""Models in Flax Linen: their base class, and the one decoder in its Linen form."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
