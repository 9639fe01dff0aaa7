"""The news that this process is to end soon. No JAX.

The signal's handler only takes a note: whatever has to be done is done by the training loop, where
no step is half taken.
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
    """Listens for SIGTERM until closed. To be made in the main thread.

    A handler that was there before is called too, after the note is taken; the default action,
    which ends the process, is not.

    Args:
        signals: which signals say so.

    Raises:
        PolicyError: this is not the main thread, which alone may listen for signals.
    """

    def __init__(self, signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise PolicyError(
                "can't listen for signals",
                path=", ".join(one.name for one in signals),
                expected="the main thread",
                found=f"thread {threading.current_thread().name!r}",
                next_step="Make this in the main thread, or set on_preemption=False.",
            )
        self._at: float | None = None
        self._closed = False
        self._before: dict[signal.Signals, _Handler] = {}
        for one in signals:
            self._before[one] = signal.signal(one, self._note)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def announced(self) -> bool:
        """Whether the process was told to end."""
        return self._at is not None

    @property
    def at(self) -> float | None:
        """When it was first told, as `time.monotonic` counts."""
        return self._at

    def announce(self) -> None:
        """Take a note, as the signal does: for news that comes another way."""
        if self._at is None:
            self._at = time.monotonic()

    def close(self) -> None:
        """Listen no more: the handlers of before are back, where ours still was in force.

        Any thread may call this; only in the main thread can handlers be put back.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._closed = True
        for one, before in self._before.items():
            # Where somebody who came later has theirs, it may call ours, and so the one before.
            if signal.getsignal(one) == self._note:
                with contextlib.suppress(TypeError):  # None: not installed from Python
                    signal.signal(one, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.announce()
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)
        elif self._closed and before == signal.SIG_DFL:  # put back by somebody who came later
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
