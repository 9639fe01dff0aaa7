"""Agreement between a job's processes: exchanged values, stragglers, failures.

Imports JAX; in a job of one process all is local.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
