"""Protocol of a run, and its only owner: who may write, which steps count, what may be deleted."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
