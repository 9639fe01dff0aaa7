"""What a client knows of the HTTP API without asking: paths, headers, answers, retries; pure."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
