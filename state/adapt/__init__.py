"""Quantized weights and low-rank adapters: settings, arithmetic, and the layers that have them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
