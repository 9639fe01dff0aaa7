"""Has the queues looked at when something waits in them, and hardly ever else.

DBOS asks the database for every queue by itself, again and again, with some statements each time.
One cheap question for all of them takes its place: whether any job waits. If one does, the
queues look at once. Nothing is lost if that fails: they look by themselves all the same, later.

DBOS has no way to be told. Its queues wait for an event that stands for the end, and that it keeps
in a list of the instance: it is exchanged for one that can also be woken (ADR 26).
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
"""How often it is asked whether a job waits; one of the same process is known of at once."""

REST_SECONDS: Final = 10.0
"""How long DBOS's threads for queues rest at least, unless they are woken."""

STOP_SECONDS: Final = 5.0
"""How long the end waits for a database that does not answer."""


class Waker:
    """Wakes the queues of one DBOS instance.

    Args:
        anything_waits: Whether a job does; asked in a thread of the waker's own.
    """

    def __init__(self, anything_waits: Callable[[], bool]) -> None:
        self._anything_waits = anything_waits
        self._condition = threading.Condition()
        self._wakes = 0
        self._seen = threading.local()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="cairn-waker", daemon=True)

    def attach(self, dbos: Any) -> None:
        """Have the queues of an instance wait so that they can be woken. Before it is launched."""
        dbos.background_thread_stop_events = _Events(self)
        # Of the thread for jobs with a delay or a time limit, of which there are none.
        _make_wakeable(dbos._background_jobs_stop_event, self)

    def start(self) -> None:
        """Begin to look for jobs that wait."""
        self._thread.start()

    def close(self) -> None:
        """Look no more."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)

    def wake(self) -> None:
        """Have every queue look now."""
        with self._condition:
            self._wakes += 1
            self._condition.notify_all()

    def wait(self, until: Callable[[], bool], seconds: float | None) -> None:
        """Return once something is true, somebody wakes, or the time is over.

        Who woke since this thread last waited counts: it may have looked just before.
        """
        with self._condition:
            seen = getattr(self._seen, "wakes", 0)
            self._condition.wait_for(lambda: until() or self._wakes != seen, seconds)
            self._seen.wakes = self._wakes

    def _look(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                waits = self._anything_waits()
            except SQLAlchemyError as exc:
                logger.debug("jobs that wait were not looked for: %s", exc)
                continue
            if waits:
                self.wake()
                self._stop.wait(LOOK_SECONDS)  # what still waits then, waits for its turn


class _Events(list[threading.Event]):
    """What DBOS appends to before it starts a thread that waits for it."""

    def __init__(self, waker: Waker) -> None:
        super().__init__()
        self._waker = waker

    def append(self, event: threading.Event) -> None:
        """Keep an event, which can be woken from now on."""
        _make_wakeable(event, self._waker)
        super().append(event)


def _make_wakeable(event: threading.Event, waker: Waker) -> None:
    event.__class__ = _Wakeable
    vars(event)["waker"] = waker


class _Wakeable(threading.Event):
    """An event whose waiting ends early, and without it being set, when somebody wakes."""

    waker: Waker

    def set(self) -> None:
        super().set()
        self.waker.wake()

    def wait(self, timeout: float | None = None) -> bool:
        self.waker.wait(self.is_set, None if timeout is None else max(timeout, REST_SECONDS))
        return self.is_set()
