"""Listeners for store requests: operation, duration and outcome of each.

All requests pass through `timed_request`, whichever library carries them. Without a listener it
costs nothing. A listener runs in the thread that made the request, after the answer.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, TypeAlias

from cairn.storage.errors import NotFoundError, StoreUnavailableError

__all__ = [
    "Operation",
    "RequestOutcome",
    "StoreListener",
    "StoreRequest",
    "listen",
    "timed_request",
]

Operation: TypeAlias = Literal["stat", "list", "read", "write", "delete", "copy"]

RequestOutcome: TypeAlias = Literal["ok", "absent", "unavailable", "error"]
"""`absent`: not found. `unavailable`: the store gave no answer, or refused."""


class StoreRequest(NamedTuple):
    """Completed or abandoned request.

    Attributes:
        operation: kind of request.
        path: object or folder of the request.
        seconds: duration, including the library's retries.
        outcome: how it ended.
    """

    operation: Operation
    path: str
    seconds: float
    outcome: RequestOutcome


StoreListener: TypeAlias = Callable[[StoreRequest], None]

_listeners: tuple[StoreListener, ...] = ()
_lock: Final = threading.Lock()


def listen(listener: StoreListener) -> Callable[[], None]:
    """Call `listener` for every request of this process, in any thread; return a stop function.

    The listener must be quick and must not raise.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)

    def end() -> None:
        global _listeners
        with _lock:
            _listeners = tuple(other for other in _listeners if other is not listener)

    return end


@contextmanager
def timed_request(operation: Operation, path: object) -> Iterator[None]:
    """Report the body as one request; an error that leaves it sets the outcome."""
    if not _listeners:
        yield
        return
    began = time.monotonic()
    ended: RequestOutcome = "error"
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
        call = StoreRequest(operation, str(path), time.monotonic() - began, ended)
        for listener in _listeners:
            listener(call)
