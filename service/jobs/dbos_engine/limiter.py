"""Limiter of concurrent work in this process, which DBOS's queues do not guarantee.

A queue counts its running workflows in memory, and counts a workflow only once its thread has
begun. If the queue polls again before that, as on a busy machine, it takes as many once more.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

POLL_SECONDS: Final = 0.1
"""Interval at which a waiting thread checks if it has to stop."""


class Limiter:
    """Limits by name for concurrent work; for many threads."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._running: Counter[str] = Counter()

    @contextmanager
    def turn(self, limits: Mapping[str, int], check: Callable[[], None]) -> Iterator[None]:
        """Wait until every name is below its limit, then hold a turn of each.

        Args:
            limits: Limits by name.
            check: Called while it waits; an error of it ends the wait.
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
