"""Store checks: a probe, before the first write, of what the run protocol requires of a store."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
