"""Who waits for other processes says in the log for whom, after a while. Imports no JAX."""

import logging
import time
from collections.abc import Callable
from typing import Final

__all__ = ["TOLD_SECONDS", "Patience"]

TOLD_SECONDS: Final = 30.0
"""After how long the log names those that are waited for; then after twice that, and so on."""

logger = logging.getLogger("cairn.processes")


class Patience:
    """How long one has waited at a place of the program."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._began = time.monotonic()
        self._told = TOLD_SECONDS

    def waited(self, whom: Callable[[], str]) -> float:
        """Seconds since the start; the log says for whom, if that is due.

        Args:
            whom: names them; only asked if it is due.
        """
        seconds = time.monotonic() - self._began
        if seconds > self._told:
            self._told *= 2
            logger.warning("waiting at %s for %s, since %.0f s", self._place, whom(), seconds)
        return seconds
