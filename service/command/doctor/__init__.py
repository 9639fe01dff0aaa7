"""`cairn doctor`: looks for what is wrong with an installation, its settings and what they name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
