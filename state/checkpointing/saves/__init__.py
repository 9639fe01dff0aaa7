"""A save of a step: checked, held on the host, written, committed by Orbax, published."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
