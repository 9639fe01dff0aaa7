"""HTTP routes, one resource per file. `cairn.service.app` includes the `router` of each file."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
