"""Python's garbage collector, while many objects are made that all stay. Pure."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collections"]


@contextmanager
def no_collections() -> Iterator[None]:
    """No garbage is collected meanwhile, unless somebody asks for it.

    To collect is to look at every object that there is, again and again as more are made: with a
    few objects for each of many leaves that takes longer than to make them, and finds nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
