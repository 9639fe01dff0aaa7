"""Durable jobs on DBOS: the only room that imports it, so that it can be followed here alone.

`Jobs` starts, watches and steers; a `Worker` executes, in the same process or in another. A job's
operation id is DBOS's workflow id; its progress is a workflow event; its steps are DBOS steps, so
that what was done before a crash is not done again.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
