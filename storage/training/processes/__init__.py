"""Agreement between the processes of one job: what each has said, who is late, what has failed.

Imports JAX; in a job of one process all is local.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
