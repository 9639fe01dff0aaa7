"""What can be done with runs, checkpoints and jobs, as plain functions; routes call these."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
