"""What a server and a worker tell of themselves: metrics, structured logs, traces."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
