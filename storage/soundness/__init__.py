"""Whether a store keeps what the run protocol rests on: asked before anybody writes."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
