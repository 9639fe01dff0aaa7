"""Delays between the tries of a delivery. Pure."""

from datetime import timedelta
from typing import Final

RETRY_SECONDS: tuple[float, ...] = (5, 30, 120, 600, 1800, 7200, 14400, 21600, 43200)
"""Delays from each try to the next, before jitter: over a day in all. After the last try, the event
is given up."""

_SPREAD: Final = 0.3


def wait_after(tries: int, chance: float) -> timedelta | None:
    """Return the delay after a number of tries; None: there is no other try.

    Args:
        tries: Number of tries so far.
        chance: Random number from 0 to 1 for the jitter, which spreads deliveries that failed
            together.
    """
    if tries > len(RETRY_SECONDS):
        return None
    return timedelta(seconds=RETRY_SECONDS[tries - 1] * (1 + _SPREAD * (2 * chance - 1)))
