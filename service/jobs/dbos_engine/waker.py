"""Waker of DBOS's queues, which then poll the database only if a job waits.

DBOS polls for every queue separately, with several statements each time. The waker replaces that by
one cheap query for any waiting job. If one waits, all queues poll at once. If the query fails,
nothing is lost: the queues poll by themselves later.

DBOS has no interface for this. Its queues wait for a stop event, which DBOS keeps in a list of its
instance. The waker replaces that event by one that can also be woken (ADR 26).
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""Interval between two queries for waiting jobs; jobs of the same process wake at once."""

REST_SECONDS: Final = 10.0
"""Shortest pause of DBOS's queue threads between two polls, in seconds, unless they are woken."""

STOP_SECONDS: Final = 5.0
"""Longest time that `close` waits for a database that does not answer."""


class Waker:
    """Waker of the queues of one DBOS instance.

    Args:
        anything_waits: Function that returns whether a job waits; called in the waker's own thread.
    """

    def __init__(self, anything_waits: Callable[[], bool]) -> None:
        self._anything_waits = anything_waits
        self._condition = threading.Condition()
        self._wakes = 0
        self._seen = threading.local()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cairn-waker", daemon=True)

    def attach(self, dbos: Any) -> None:
        """Make the queues of a DBOS instance wakeable; call it before the instance is launched."""
        dbos.background_thread_stop_events = _Events(self)
        # The event of DBOS's thread for delayed jobs and jobs with a time limit; Cairn has none of
        # these.
        _make_wakeable(dbos._background_jobs_stop_event, self)

    def start(self) -> None:
        """Start the thread that polls the database for waiting jobs."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; wait at most `STOP_SECONDS` for its end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def wake(self) -> None:
        """Make every queue poll now."""
        with self._condition:
            self._wakes += 1
            self._condition.notify_all()

    def wait(self, until: Callable[[], bool], seconds: float | None) -> None:
        """Wait until a condition is true, `wake` is called, or the time is over.

        A call of `wake` since this thread's last wait also ends the wait: the thread may have
        polled just before that call.

        Args:
            until: Condition, checked after each wake-up.
            seconds: Longest time to wait; None: no limit.
        """
        with self._condition:
            seen = getattr(self._seen, "wakes", 0)
            self._condition.wait_for(lambda: until() or self._wakes != seen, seconds)
            self._seen.wakes = self._wakes

    def _run(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                waits = self._anything_waits()
            except SQLAlchemyError as exc:
                logger.debug("jobs that wait were not looked for: %s", exc)
                continue
            if waits:
                self.wake()
                self._stop.wait(POLL_SECONDS)  # a job that still waits is held back by a limit


class _Events(list[threading.Event]):
    """List that makes DBOS's stop events wakeable; DBOS appends one before it starts a thread."""

    def __init__(self, waker: Waker) -> None:
        super().__init__()
        self._waker = waker

    def append(self, event: threading.Event) -> None:
        """Append an event, and make it wakeable."""
        _make_wakeable(event, self._waker)
        super().append(event)


def _make_wakeable(event: threading.Event, waker: Waker) -> None:
    event.__class__ = _Wakeable
    vars(event)["waker"] = waker


class _Wakeable(threading.Event):
    """Event whose `wait` also returns when the waker wakes, although the event is not set."""

    waker: Waker

    def set(self) -> None:
        super().set()
        self.waker.wake()

    def wait(self, timeout: float | None = None) -> bool:
        self.waker.wait(self.is_set, None if timeout is None else max(timeout, REST_SECONDS))
        return self.is_set()
