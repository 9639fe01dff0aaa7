"""Progress of a running job: counted per block, reported a few times a second."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final

REPORT_INTERVAL_SECONDS = 0.2

PACE_SECONDS: Final = 30.0
"""Time span of the speed by which the remaining time is estimated, in seconds."""

_SOONEST: Final = 2.0  # seconds before an estimate is made


class ProgressMeter:
    """Meter that counts bytes, and reports at most every `interval` seconds.

    Args:
        publish: Function that is called with each report, a JSON object with `done_bytes`,
            `total_bytes`, `message`, `seconds_left`.
        clock: Monotonic clock, in seconds.
        interval: Seconds between two reports; `flush` always reports the last state.
    """

    def __init__(
        self,
        publish: Callable[[dict[str, Any]], None],
        *,
        clock: Callable[[], float],
        interval: float = REPORT_INTERVAL_SECONDS,
    ) -> None:
        self._publish = publish
        self._clock = clock
        self._interval = interval
        self._reported_at: float | None = None
        self._pending = False
        self.done_bytes = 0
        self.total_bytes: int | None = None
        self.message = ""
        self._paces: deque[tuple[float, int]] = deque()

    def set(
        self,
        *,
        done_bytes: int | None = None,
        total_bytes: int | None = None,
        message: str | None = None,
    ) -> None:
        """Replace the given values, and keep the others."""
        self.done_bytes = self.done_bytes if done_bytes is None else done_bytes
        self.total_bytes = self.total_bytes if total_bytes is None else total_bytes
        self.message = self.message if message is None else message
        self._touch(force=message is not None)

    def advance(self, nbytes: int) -> None:
        """Add `nbytes` to the finished bytes."""
        self.done_bytes += nbytes
        self._touch(force=False)

    def flush(self) -> None:
        """Report the last state, if it was not reported yet."""
        if self._pending:
            self._touch(force=True)

    def _touch(self, *, force: bool) -> None:
        now = self._clock()
        self._pending = True
        due = self._reported_at is None or now - self._reported_at >= self._interval
        if not (force or due):
            return
        self._reported_at = now
        self._pending = False
        self._publish(
            {
                "done_bytes": self.done_bytes,
                "total_bytes": self.total_bytes,
                "message": self.message,
                "seconds_left": self._seconds_left(now),
            }
        )

    def _seconds_left(self, now: float) -> float | None:
        """Estimate the remaining seconds by the recent speed; None: there is no estimate yet."""
        paces, done, total = self._paces, self.done_bytes, self.total_bytes
        if total is None or (paces and done < paces[-1][1]):  # another step of work has begun
            paces.clear()
        if total is None:
            return None
        paces.append((now, done))
        while now - paces[0][0] > PACE_SECONDS and len(paces) > 2:
            paces.popleft()
        since, before = paces[0]
        if now - since < _SOONEST or done <= before:
            return None
        return round(max(0, total - done) * (now - since) / (done - before), 1)
