"""Client side of the HTTP protocol: paths, headers, answers and retries; no I/O."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
