"""Rate limits: token buckets by name. Pure, with a clock passed in."""

import time
from collections.abc import Callable
from typing import Final

MAX_NAMES: Final = 10_000
"""Names with a bucket of their own. Beyond that, full buckets are dropped."""


class RateLimiter:
    """Token bucket for each name: a burst, then a constant rate.

    Args:
        per_second: Rate per second; 0: no limit.
        at_once: Size of a burst.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, per_second: float, at_once: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_second = per_second
        self._at_once = max(1.0, at_once)
        self._clock = clock
        self._used: dict[str, tuple[float, float]] = {}  # missing tokens, and the time

    def wait(self, name: str) -> float:
        """Return the seconds until a name may take its next token; 0: it may now."""
        if self._per_second == 0:
            return 0.0
        return max(0.0, (self._missing(name) + 1 - self._at_once) / self._per_second)

    def take(self, name: str) -> None:
        """Take a token from the bucket of a name, even if the bucket is empty."""
        if self._per_second == 0:
            return
        if len(self._used) >= MAX_NAMES and name not in self._used:
            self._used = {
                other: used for other, used in self._used.items() if self._missing(other) > 0
            }
            if len(self._used) >= MAX_NAMES:  # an attack with many names: start over
                self._used.clear()
        self._used[name] = self._missing(name) + 1, self._clock()

    def _missing(self, name: str) -> float:
        missing, since = self._used.get(name, (0.0, 0.0))
        return max(0.0, missing - (self._clock() - since) * self._per_second)
