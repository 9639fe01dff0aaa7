"""Events and who is told of them: webhooks, what is delivered to each, and what delivers it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
