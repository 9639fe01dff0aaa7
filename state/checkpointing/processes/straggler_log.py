"""Log messages of a process that waits for stragglers."""

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["FIRST_LOG_SECONDS", "StragglerLog"]

FIRST_LOG_SECONDS: Final = 30.0
"""Seconds of waiting after which stragglers are first logged; then after 2, 4, ... times that."""

logger = logging.getLogger("cairn.processes")


class StragglerLog:
    """Timer of one wait for other processes, which logs the stragglers now and then."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._began = time.monotonic()
        self._next_log = FIRST_LOG_SECONDS

    def waited(self, missing: Callable[[], str]) -> float:
        """Return the seconds since the wait began; log the stragglers if a log line is due.

        Args:
            missing: function that returns their names; called only if a log line is due.
        """
        seconds = time.monotonic() - self._began
        if seconds > self._next_log:
            self._next_log *= 2
            logger.warning("waiting at %s for %s, since %.0f s", self._place, missing(), seconds)
        return seconds
