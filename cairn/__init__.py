"""Cairn keeps the checkpoints of JAX training jobs. What users need is importable from here.

Names are loaded when they are first used: `import cairn` costs nothing and loads no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
