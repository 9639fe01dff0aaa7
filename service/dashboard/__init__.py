"""Dashboard: pages rendered on the server. They read and change state only through the actions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
