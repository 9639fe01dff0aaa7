"""The stored format of arrays: dtypes, chunks, digests, OCDBT, value files. Pure."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
