"""Cairn's storage layer: runs and checkpoints in an object store.

Names are loaded when first used, so `import cairn.storage` costs nothing and loads no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
