"""Python's garbage collector, while many objects are made that all stay. Pure."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]

_lock = threading.Lock()
_within = 0
"""How many don't want collections now, in all threads."""
_enabled = False
"""Whether there were any before the first of them."""


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is collected meanwhile, unless somebody asks for it.

    To collect is to look at every object that there is, again and again as more are made: with a
    few objects for each of many leaves that takes longer than to make them, and finds nothing.
    What one thread has entered, another may leave.
    """
    global _within, _enabled
    with _lock:
        if not _within:
            _enabled = gc.isenabled()
            gc.disable()
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within = max(0, _within - 1)
            if _enabled and not _within:
                gc.enable()


def _enable_in_child() -> None:
    """Of a forked process: the threads that were within are not in it."""
    global _lock, _within
    _lock = threading.Lock()
    if _within and _enabled:
        gc.enable()
    _within = 0


os.register_at_fork(after_in_child=_enable_in_child)
