"""One save of a step: described, held on the host, written by Orbax, followed to its end."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
