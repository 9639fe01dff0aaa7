"""Durable jobs: the engine that runs them, what they record, and the kinds that there are."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
