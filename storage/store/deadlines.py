"""How long a store may be silent: one limit for every wait, whatever library carries the call.

A wait ends once nothing that belongs to it was answered for `DEADLINE_SECONDS`, and at the end of
the caller's own time, if it set one by `within`. TensorStore's futures are waited for by `outcome`.
What waits without any limit inside, as fsspec does, runs in a thread of its own (`WatchedCall`):
that can be given up. What was given up may go on, for as long as the store keeps it; so whoever
gives up must see to it that nobody looks at what it may still do.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar

import tensorstore as ts

from cairn.storage.errors import StoreUnavailableError

__all__ = [
    "DEADLINE_SECONDS",
    "Progress",
    "ReadProgress",
    "WatchedCall",
    "answer",
    "outcome",
    "own_seconds_left",
    "silence",
    "within",
]

DEADLINE_SECONDS = 90.0
"""How long nothing may be answered before the store counts as unavailable, retries included."""

_READ_STEP_BYTES: Final = 1 << 20
"""So much was read: some read is going on, and not just somebody renewing a lease."""

_LOOKS: Final = 4
"""How often in a deadline it is looked whether bytes arrive."""

T = TypeVar("T")


_ends: ContextVar[float] = ContextVar("cairn_deadline", default=math.inf)
"""When the caller's own time ends, on the clock of `time.monotonic`."""


@contextmanager
def within(seconds: float | None) -> Iterator[None]:
    """Have every wait in this context end by then; of nested ones the soonest counts.

    A thread has a context of its own, unless it was started with that of another.

    Args:
        seconds: from now on; None changes nothing.
    """
    before = _ends.get()
    token = _ends.set(before if seconds is None else min(before, time.monotonic() + seconds))
    try:
        yield
    finally:
        _ends.reset(token)


def own_seconds_left() -> float | None:
    """What is left of the time that the caller set by `within`; None if it set none."""
    ends = _ends.get()
    if ends == math.inf:
        return None
    return min(max(0.0, ends - time.monotonic()), threading.TIMEOUT_MAX)


def silence(path: object, seconds: float, found: str = "none") -> StoreUnavailableError:
    """What to raise for a store that said nothing for so long."""
    return StoreUnavailableError(
        "the store does not answer",
        path=path,
        expected=f"an answer within {seconds:.3g} s",
        found=found,
        next_step="Check that the store can be reached from here, then try again.",
    )


class Progress:
    """When calls that belong together were answered last: an answer to one is progress of all."""

    def __init__(self) -> None:
        """It begins now."""
        self._at = time.monotonic()
        self._elsewhere = 0
        self._lock = threading.Lock()

    def made(self) -> None:
        """Something was answered."""
        self._at = time.monotonic()

    def look(self) -> None:
        """Find out whether there was some that nobody has told of; called now and then."""

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Meanwhile nothing is asked here: what goes on has limits of its own."""
        with self._lock:
            self._elsewhere += 1
        try:
            yield
        finally:
            self.made()
            with self._lock:
                self._elsewhere -= 1

    def end_within(self, seconds: float) -> None:
        """From now on that much is allowed, and no more."""
        self._at = min(self._at, time.monotonic() - DEADLINE_SECONDS + seconds)

    def seconds_left(self, began: float = -math.inf) -> float:
        """Until the wait is over, if nothing is answered.

        Args:
            began: when it did, on the clock of `time.monotonic`.
        """
        now = time.monotonic()
        since = now if self._elsewhere else max(began, self._at)
        return max(0.0, min(since + DEADLINE_SECONDS, _ends.get()) - now)


class ReadProgress(Progress):
    """The same for reads of arrays: bytes that TensorStore brings count before a read is whole."""

    def __init__(self) -> None:
        """It begins now."""
        super().__init__()
        self._bytes = _bytes_read()

    def look(self) -> None:
        """Count the bytes that this process has read."""
        count = _bytes_read()
        if count - self._bytes >= _READ_STEP_BYTES:
            self._bytes = count
            self.made()


def _bytes_read() -> int:
    """By all of TensorStore's key-value stores in this process, once each request is answered."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(
        int(value["value"])
        for metric in metrics
        if metric["name"].endswith("/bytes_read")
        for value in metric["values"]
    )


def outcome(future: Any, progress: Progress | None = None) -> Any:
    """The result of a future of TensorStore's.

    Args:
        future: of a read, a write or whatever else.
        progress: of the calls that it belongs to; None if it is alone.

    Raises:
        TimeoutError: nothing was answered for too long; what it does is cancelled.
        Exception: what it raised.
    """
    shared = Progress() if progress is None else progress
    began = time.monotonic()
    while True:
        left = shared.seconds_left(began)
        try:
            result = future.result(timeout=min(left, DEADLINE_SECONDS / _LOOKS))
        except TimeoutError:
            shared.look()
            if shared.seconds_left(began) > 0:
                continue
            future.cancel()
            seconds = time.monotonic() - began
            raise TimeoutError(f"no answer within {seconds:.3g} s") from None
        shared.made()
        return result


class WatchedCall(Generic[T]):
    """A call that may wait for good, in a thread that does not keep the process alive."""

    def __init__(self, call: Callable[[], T], *, path: object) -> None:
        """Begins.

        Args:
            call: what to do.
            path: what the error names.
        """
        self._path = path
        self._outcome: Future[T] = Future()
        self._began = time.monotonic()
        threading.Thread(target=self._run, args=(call,), name="cairn-call", daemon=True).start()

    @property
    def running(self) -> bool:
        """Whether it still goes on, given up or not."""
        return not self._outcome.done()

    def result(self, progress: Progress | None = None) -> T:
        """What it gave.

        Args:
            progress: of the calls that it makes; None: its return is the only one to be seen.

        Raises:
            StoreUnavailableError: nothing was answered for too long; it is given up.
            Exception: what it raised.
        """
        shared = Progress() if progress is None else progress
        while not wait([self._outcome], min(shared.seconds_left(), DEADLINE_SECONDS / _LOOKS)).done:
            if shared.seconds_left() <= 0:
                raise silence(self._path, time.monotonic() - self._began)
        return self._outcome.result()

    def _run(self, call: Callable[[], T]) -> None:
        try:
            self._outcome.set_result(call())
        except BaseException as exc:
            self._outcome.set_exception(exc)


def answer(call: Callable[[], T], *, path: object) -> T:
    """What `call` gives, which one answer of a store is enough for.

    Raises:
        StoreUnavailableError: nothing was answered for too long; it is given up.
        Exception: what it raised.
    """
    return WatchedCall(call, path=path).result()
