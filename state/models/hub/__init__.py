"""Models in memory to and from Hugging Face's formats, each weight placed by itself."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
