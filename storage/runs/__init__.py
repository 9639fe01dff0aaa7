"""The run protocol and its one owner: who may write, which steps count, what may go."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
