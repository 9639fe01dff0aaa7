"""Limiter of concurrent work in this process, since DBOS's queues may exceed their own limits.

A queue counts its running workflows in memory, and counts a workflow only once its thread has
begun. If the queue polls again before that, as on a busy machine, it starts as many once more.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

POLL_SECONDS: Final = 0.1
"""Interval at which a waiting thread checks whether it has to stop, in seconds."""


class Limiter:
    """Limits of concurrent work, each with a name. Safe for use by many threads."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._running: Counter[str] = Counter()

    @contextmanager
    def turn(self, limits: Mapping[str, int], check: Callable[[], None]) -> Iterator[None]:
        """Wait until every name is below its limit, then count this block for each name.

        Args:
            limits: Limits by name.
            check: Function that is called while waiting; if it raises, the wait ends with its
                error.
        """
        with self._ended:
            while any(self._running[name] >= limit for name, limit in limits.items()):
                check()
                self._ended.wait(POLL_SECONDS)
            self._running.update(limits.keys())
        try:
            yield
        finally:
            with self._ended:
                self._running -= Counter(limits.keys())
                self._ended.notify_all()
