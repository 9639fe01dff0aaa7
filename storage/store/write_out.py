"""Has a disk begin with what is in the page cache, before an fsync has to wait for all of it."""

import ctypes
import functools
from collections.abc import Callable
from typing import Final

__all__ = ["write_out"]

_SYNC_FILE_RANGE_WRITE: Final = 2


def write_out(descriptor: int, start: int, end: int) -> None:
    """Start to write bytes of an open file to its disk; does not wait, and promises nothing.

    Where the system has no such call, or refuses it, nothing happens.
    """
    call = _sync_file_range()
    if call is not None:
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(end - start), _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    """Linux's call of that name; see its manual page, sync_file_range(2)."""
    found: Callable[..., int] | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    return found
