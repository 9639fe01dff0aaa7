"""Weights that were published quantized (FP8 and MXFP4), read as the plain model's. JAX-free."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
