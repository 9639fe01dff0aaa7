"""Time limit and backoff of a client whose server does not answer."""

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from cairn.service.errors import ProblemResponseError

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 2.0
_TRANSIENT: Final = frozenset(
    {
        HTTPStatus.TOO_MANY_REQUESTS,
        HTTPStatus.BAD_GATEWAY,
        HTTPStatus.SERVICE_UNAVAILABLE,
        HTTPStatus.GATEWAY_TIMEOUT,
    }
)


class Backoff:
    """Time limit and exponential backoff of repeated requests.

    Args:
        seconds: Longest time without an answer.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._failing_since: float | None = None

    def answered(self) -> None:
        """Record that the server has answered."""
        self._failing_since = None

    def failed(self, exc: Exception) -> bool:
        """Record a failed request; return True if the caller must raise its error."""
        if isinstance(exc, ProblemResponseError) and exc.status not in _TRANSIENT:
            return True
        now = self._clock()
        self._failing_since = now if self._failing_since is None else self._failing_since
        return now - self._failing_since >= self.seconds

    def begin_again(self, pause: float | None = None) -> None:
        """Reset the backoff.

        Args:
            pause: Seconds to wait before the next request, if the server asked for a pause.
        """
        self._pause = pause or FIRST_PAUSE

    def pause(self) -> float:
        """Return the seconds to wait before the next request; each call doubles them, up to two."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause
