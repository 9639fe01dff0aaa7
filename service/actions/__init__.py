"""What can be done with runs and checkpoints, as plain functions: what routes and jobs call."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
