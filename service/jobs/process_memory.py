"""Setting of the C library's allocator, for processes that execute jobs."""

import ctypes
import sys
from typing import Final

__all__ = ["keep_one_arena"]

_M_ARENA_MAX: Final = -8


def keep_one_arena() -> bool:
    """Make all threads of this process allocate from one arena; return whether that is possible.

    By default glibc gives each thread an arena of its own, which keeps freed memory. Exports read
    and transform blocks of megabytes on several threads. With several arenas, the peak of memory
    grows with the size of the model: 430 MB in place of 290 MB at 6 GB (`benchmarks/export.py`). A
    thread that has an arena already keeps it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))
