"""When what was not taken is sent again. Pure."""

from datetime import timedelta
from typing import Final

RETRY_SECONDS: tuple[float, ...] = (5, 30, 120, 600, 1800, 7200, 14400, 21600, 43200)
"""From each try to the next, about: over a day in all. After the last, an event is given up."""

_SPREAD: Final = 0.3


def wait_after(tries: int, chance: float) -> timedelta | None:
    """How long to wait after so many tries; None: there is no other.

    Args:
        tries: That were made.
        chance: From 0 to 1: what failed together is not tried again together.
    """
    if tries > len(RETRY_SECONDS):
        return None
    return timedelta(seconds=RETRY_SECONDS[tries - 1] * (1 + _SPREAD * (2 * chance - 1)))
