"""Tells whoever listens of every request to a store: what it was, how long it took, how it ended.

The one place that all requests go through, whatever library carries them. Without a listener it
costs nothing. What a listener does is done in the thread that asked, once it has its answer.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, TypeAlias

from cairn.storage.errors import NotFoundError, StoreUnavailableError

__all__ = ["CallOutcome", "Operation", "StoreCall", "StoreListener", "called", "listen"]

Operation: TypeAlias = Literal["stat", "list", "read", "write", "delete", "copy"]

CallOutcome: TypeAlias = Literal["ok", "absent", "unavailable", "error"]
"""`absent`: there is no such thing. `unavailable`: the store gave no answer, or refused."""


class StoreCall(NamedTuple):
    """A request that has been answered, or given up.

    Attributes:
        operation: what was asked for.
        path: of what.
        seconds: until the answer, with all that the library tried again.
        outcome: how it ended.
    """

    operation: Operation
    path: str
    seconds: float
    outcome: CallOutcome


StoreListener: TypeAlias = Callable[[StoreCall], None]

_listeners: tuple[StoreListener, ...] = ()
_lock: Final = threading.Lock()


def listen(listener: StoreListener) -> Callable[[], None]:
    """Have every request of this process told to `listener`, by any thread; returns what ends it.

    It must be quick, and raise nothing.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)

    def end() -> None:
        global _listeners
        with _lock:
            _listeners = tuple(one for one in _listeners if one is not listener)

    return end


@contextmanager
def called(operation: Operation, path: object) -> Iterator[None]:
    """What is done inside is one request; an error that leaves it is how that ended."""
    if not _listeners:
        yield
        return
    began = time.monotonic()
    ended: CallOutcome = "error"
    try:
        yield
        ended = "ok"
    except NotFoundError:
        ended = "absent"
        raise
    except (StoreUnavailableError, TimeoutError):
        ended = "unavailable"
        raise
    finally:
        call = StoreCall(operation, str(path), time.monotonic() - began, ended)
        for listener in _listeners:
            listener(call)
