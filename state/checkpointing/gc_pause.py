"""Pause of Python's garbage collector while many long-lived objects are created."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pause_gc"]

_lock = threading.Lock()
_within = 0
"""Number of open contexts, over all threads."""
_enabled = False
"""True if the collector was enabled when the first of the open contexts was entered."""


@contextmanager
def pause_gc() -> Iterator[None]:
    """Disable automatic garbage collection within the context.

    While a large tree is created, each collection visits all of its objects again and frees none:
    that takes longer than creating them. One thread may enter the context and another leave it.
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
    """End all pauses in a forked child, which lacks the threads that would leave the contexts."""
    global _lock, _within
    _lock = threading.Lock()
    if _within and _enabled:
        gc.enable()
    _within = 0


os.register_at_fork(after_in_child=_enable_in_child)
