"""What every route needs of HTTP: problems, preconditions, pages, ranges, keys, limits."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
