"""Durable jobs: the engine that runs them, their records, and all kinds of jobs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
