"""Deadlines for every wait on a store, whichever library carries the call.

A wait ends when none of its calls was answered for `DEADLINE_SECONDS`, or at the caller's own
deadline (`deadline_after`). `wait_for` waits for TensorStore's futures. fsspec waits without a
limit, so its calls run in a thread of their own (`WatchedCall`), which the caller can abandon. An
abandoned call may still complete for as long as the store holds it: whoever abandons a write must
make sure that nobody reads what it may yet write.
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
    "call_with_deadline",
    "deadline_after",
    "deadline_seconds_left",
    "no_answer_error",
    "set_outcome",
    "wait_for",
]

DEADLINE_SECONDS = 90.0
"""Seconds without an answer, retries included, after which the store counts as unavailable."""

_READ_STEP_BYTES: Final = 1 << 20
"""Bytes whose arrival counts as progress: more than a background lease renewal reads."""

_LOOKS: Final = 4
"""Number of checks for arriving bytes within a deadline."""

T = TypeVar("T")


_ends: ContextVar[float] = ContextVar("cairn_deadline", default=math.inf)
"""The caller's own deadline, on the clock of `time.monotonic`."""


@contextmanager
def deadline_after(seconds: float | None) -> Iterator[None]:
    """End every wait in this context after `seconds`; the earliest of nested deadlines counts.

    A thread starts without the deadline, unless it runs in a copy of the caller's context.

    Args:
        seconds: from now on; None changes nothing.
    """
    before = _ends.get()
    token = _ends.set(before if seconds is None else min(before, time.monotonic() + seconds))
    try:
        yield
    finally:
        _ends.reset(token)


def deadline_seconds_left() -> float | None:
    """Return the seconds until the caller's own deadline; None if `deadline_after` set none."""
    ends = _ends.get()
    if ends == math.inf:
        return None
    return min(max(0.0, ends - time.monotonic()), threading.TIMEOUT_MAX)


def no_answer_error(path: object, seconds: float, found: str = "none") -> StoreUnavailableError:
    """Return the error for a store that gave no answer for `seconds`."""
    return StoreUnavailableError(
        "the store does not answer",
        path=path,
        expected=f"an answer within {seconds:.3g} s",
        found=found,
        next_step="Check that the store can be reached from here, then try again.",
    )


class Progress:
    """Time of the last answer to a group of calls: an answer to one is progress of all."""

    def __init__(self) -> None:
        """Start the clock now."""
        self._at = time.monotonic()
        self._pauses = 0
        self._lock = threading.Lock()

    def record_answer(self) -> None:
        """Record that a call was answered."""
        self._at = time.monotonic()

    def poll(self) -> None:
        """Detect progress that no call reported; `wait_for` calls this now and then."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock while the caller waits for something that has limits of its own."""
        with self._lock:
            self._pauses += 1
        try:
            yield
        finally:
            self.record_answer()
            with self._lock:
                self._pauses -= 1

    def end_within(self, seconds: float) -> None:
        """Shorten the time that is left to `seconds`."""
        self._at = min(self._at, time.monotonic() - DEADLINE_SECONDS + seconds)

    def seconds_left(self, began: float = -math.inf) -> float:
        """Return the seconds until the wait ends if there is no answer.

        Args:
            began: start of the wait, on the clock of `time.monotonic`.
        """
        now = time.monotonic()
        since = now if self._pauses else max(began, self._at)
        return max(0.0, min(since + DEADLINE_SECONDS, _ends.get()) - now)


class ReadProgress(Progress):
    """Progress of array reads: bytes that TensorStore receives count before a read completes."""

    def __init__(self) -> None:
        """Start the clock now."""
        super().__init__()
        self._bytes = _bytes_read()

    def poll(self) -> None:
        """Count the bytes that this process has read as progress."""
        count = _bytes_read()
        if count - self._bytes >= _READ_STEP_BYTES:
            self._bytes = count
            self.record_answer()


def _bytes_read() -> int:
    """Return the bytes that TensorStore's key-value stores received in answered requests."""
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/")
    return sum(
        int(value["value"])
        for metric in metrics
        if metric["name"].endswith("/bytes_read")
        for value in metric["values"]
    )


def wait_for(future: Any, progress: Progress | None = None) -> Any:
    """Wait for a TensorStore future and return its result.

    Args:
        future: future of any TensorStore operation.
        progress: progress of the group of calls to which it belongs; None if it is alone.

    Raises:
        TimeoutError: no answer came in time; the future is cancelled.
        Exception: the future's error.
    """
    shared = Progress() if progress is None else progress
    began = time.monotonic()
    while True:
        left = shared.seconds_left(began)
        try:
            result = future.result(timeout=min(left, DEADLINE_SECONDS / _LOOKS))
        except TimeoutError:
            shared.poll()
            if shared.seconds_left(began) > 0:
                continue
            future.cancel()
            seconds = time.monotonic() - began
            raise TimeoutError(f"no answer within {seconds:.3g} s") from None
        shared.record_answer()
        return result


class WatchedCall(Generic[T]):
    """Call that may block forever, in a daemon thread that lets the process exit."""

    def __init__(self, call: Callable[[], T], *, path: object) -> None:
        """Start the call.

        Args:
            call: the function to run.
            path: the path that the error names.
        """
        self._path = path
        self._outcome: Future[T] = Future()
        self._began = time.monotonic()
        threading.Thread(
            target=set_outcome, args=(self._outcome, call), name="cairn-call", daemon=True
        ).start()

    @property
    def is_running(self) -> bool:
        """True while the call runs, abandoned or not."""
        return not self._outcome.done()

    def result(self, progress: Progress | None = None) -> T:
        """Wait for the call and return its result.

        Args:
            progress: progress of the requests that the call makes; None: only its return is an
                answer.

        Raises:
            StoreUnavailableError: no answer came in time; the call is abandoned.
            Exception: the call's error.
        """
        shared = Progress() if progress is None else progress
        while not wait([self._outcome], min(shared.seconds_left(), DEADLINE_SECONDS / _LOOKS)).done:
            if shared.seconds_left() <= 0:
                raise no_answer_error(self._path, time.monotonic() - self._began)
        return self._outcome.result()


def set_outcome(future: Future[T], call: Callable[[], T]) -> None:
    """Call a function, and set the future to what it returns or raises."""
    try:
        future.set_result(call())
    except BaseException as exc:
        future.set_exception(exc)


def call_with_deadline(call: Callable[[], T], *, path: object) -> T:
    """Run `call`, which makes one request to a store, and return its result.

    Raises:
        StoreUnavailableError: no answer came in time; the call is abandoned.
        Exception: the call's error.
    """
    return WatchedCall(call, path=path).result()
