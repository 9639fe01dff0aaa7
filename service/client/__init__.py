"""The typed client of the HTTP API. Imports nothing of the server."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
