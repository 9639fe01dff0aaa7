"""Detection of preemption: a signal says that this process will be ended soon.

The signal handler only sets a flag; the training loop reads it between two steps, and saves.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from cairn.storage.errors import PolicyError

__all__ = ["Preemption"]

_Handler = Callable[[int, FrameType | None], Any] | int | None


class Preemption:
    """Listener for SIGTERM until `close`. Create it in the main thread.

    On a signal it sets its flag, then calls the handler that was installed before. The default
    action, which would end the process, is suppressed.

    Args:
        signals: signals to listen for.

    Raises:
        PolicyError: this is not the main thread; Python lets no other install signal handlers.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise PolicyError(
                "can't listen for signals",
                path=", ".join(number.name for number in signals),
                expected="the main thread",
                found=f"thread {threading.current_thread().name!r}",
                next_step="Make this in the main thread, or set on_preemption=False.",
            )
        self._at: float | None = None
        self._closed = False
        self._before: dict[signal.Signals, _Handler] = {}
        for number in signals:
            self._before[number] = signal.signal(number, self._note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def announced(self) -> bool:
        """True once a signal has come, or `announce` was called."""
        return self._at is not None

    @property
    def at(self) -> float | None:
        """Time of the first signal or `announce`, by `time.monotonic`; None before."""
        return self._at

    def announce(self) -> None:
        """Set the flag, as the signal does; for preemption notices that are not signals."""
        if self._at is None:
            self._at = time.monotonic()

    def close(self) -> None:
        """Stop listening: restore the earlier handler of each signal whose handler is still ours.

        In a thread other than the main thread this does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._closed = True
        for number, before in self._before.items():
            # If a later handler replaced ours, it stays: it may call ours, which calls the earlier.
            if signal.getsignal(number) == self._note:
                with contextlib.suppress(TypeError):  # None: not installed from Python
                    signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.announce()
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
        elif self._closed and before == signal.SIG_DFL:  # a later handler restored ours
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
