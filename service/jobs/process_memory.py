"""What a process that executes jobs asks of the C library's allocator. JAX-free."""

import ctypes
import sys
from typing import Final

__all__ = ["keep_one_arena"]

_M_ARENA_MAX: Final = -8


def keep_one_arena() -> bool:
    """Has all threads of this process allocate from one arena; whether the C library can.

    By itself glibc gives each thread an arena of its own, each of which keeps what was freed in
    it. Exports read and transform blocks of megabytes on several threads: their peak would grow
    with the size of the model by what lies free in the arenas (`benchmarks/export.py`: 430 MB at
    6 GB instead of 290). Threads that have an arena by now keep it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(_M_ARENA_MAX, 1))
