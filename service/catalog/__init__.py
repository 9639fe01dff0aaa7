"""The catalog: an index of what the store holds, and the audit trail of what was done here."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
