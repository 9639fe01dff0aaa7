"""Actions on runs, checkpoints and jobs, as plain functions that the routes call."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
