"""The safetensors format: header, reading, and streamed writing in shards."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
