"""Setting of the C library's allocator for processes that execute jobs. JAX-free."""

import ctypes
import sys
from typing import Final

__all__ = ["keep_one_arena"]

_M_ARENA_MAX: Final = -8


def keep_one_arena() -> bool:
    """Make all threads of this process allocate from one arena; return whether that is possible.

    By default glibc gives each thread an arena of its own, which keeps freed memory. Exports read
    and transform blocks of megabytes on several threads, so their peak would grow with the size of
    the model by the free memory in the arenas (`benchmarks/export.py`: 430 MB at 6 GB instead of
    290). Threads that have an arena already keep it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))
