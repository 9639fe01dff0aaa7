"""`cairn doctor`: checks an installation, its settings, and the stores and databases they name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
