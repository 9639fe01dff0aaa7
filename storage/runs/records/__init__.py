"""What lies in a run, one kind of record a file: names, fields, how it is read and written."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
