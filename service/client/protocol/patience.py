"""How long a server that gives no answer is waited for, and how long between two questions."""

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


class Patience:
    """Of who asks again and again.

    Args:
        seconds: How long without any answer.
        clock: Monotonic seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._pause = FIRST_PAUSE
        self._failing_since: float | None = None

    def answered(self) -> None:
        """The server is there."""
        self._failing_since = None

    def failed(self, exc: Exception) -> bool:
        """There was no answer, or a problem; whether it is to be raised."""
        if isinstance(exc, ProblemResponseError) and exc.status not in _TRANSIENT:
            return True
        now = self._clock()
        self._failing_since = now if self._failing_since is None else self._failing_since
        return now - self._failing_since >= self.seconds

    def begin_again(self, pause: float | None = None) -> None:
        """Something new came: the next pause is short, or what the server asks for."""
        self._pause = pause or FIRST_PAUSE

    def pause(self) -> float:
        """Seconds to wait before the next question: twice as long each time, up to two seconds."""
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE)
        return pause
