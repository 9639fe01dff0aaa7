"""Log messages of a process that waits for others. Imports no JAX."""

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["TOLD_SECONDS", "Patience"]

TOLD_SECONDS: Final = 30.0
"""Seconds until the log first names the stragglers; the interval doubles each time."""

logger = logging.getLogger("cairn.processes")


class Patience:
    """Timer of a wait at a call site."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._began = time.monotonic()
        self._told = TOLD_SECONDS

    def waited(self, whom: Callable[[], str]) -> float:
        """Return the seconds since the start; log who is missing if that is due.

        Args:
            whom: names them; called only if a log line is due.
        """
        seconds = time.monotonic() - self._began
        if seconds > self._told:
            self._told *= 2
            logger.warning("waiting at %s for %s, since %.0f s", self._place, whom(), seconds)
        return seconds
