"""HTTP parts that all routes share: problems, preconditions, paging, byte ranges, limits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
