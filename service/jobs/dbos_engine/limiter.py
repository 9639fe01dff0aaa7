"""A bound on what runs at the same time in this process, which DBOS's queues alone do not keep.

A queue counts what runs here in memory, and counts a workflow only once its thread has begun. A
queue that looks again before then, as on a busy machine, takes as many once more.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

LOOK_SECONDS: Final = 0.1
"""How often who waits for a turn looks whether it is to stop."""


class Limiter:
    """Bounds by name how many run at the same time; for many threads."""

    def __init__(self) -> None:
        self._ended = threading.Condition()
        self._running: Counter[str] = Counter()

    @contextmanager
    def turn(self, limits: Mapping[str, int], check: Callable[[], None]) -> Iterator[None]:
        """Wait until fewer than its limit run of each name, and count as one of each meanwhile.

        Args:
            limits: By name.
            check: Called while it waits; what it raises ends the waiting.
        """
        with self._ended:
            while any(self._running[name] >= limit for name, limit in limits.items()):
                check()
                self._ended.wait(LOOK_SECONDS)
            self._running.update(limits.keys())
        try:
            yield
        finally:
            with self._ended:
                self._running -= Counter(limits.keys())
                self._ended.notify_all()
