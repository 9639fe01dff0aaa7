"""Who is told of durable steps: functions that installed packages name. No JAX.

A package names them in the group of entry points `cairn.durable_steps`. They are called one after
the other in a thread of their own, which no save and no training step ever waits for: a hint to
others, as the store says everything.
"""

import atexit
import importlib.metadata
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["GROUP", "Listener", "tell"]

logger = logging.getLogger(__name__)

GROUP: Final = "cairn.durable_steps"

Listener = Callable[[str, int, int], None]
"""Called with the URI of a run, a step of it that has become durable, and the step's attempt."""

_KEPT: Final = 1000
"""So many steps wait to be told of; of what comes then nobody is told."""

_LAST_SECONDS: Final = 1.0
"""How long the end of the process waits for somebody who is being told."""


class _Telling:
    """The thread of this process, begun with the first durable step."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[str, int, int]] = queue.Queue(_KEPT)
        self._idle = threading.Event()
        threading.Thread(target=self._tell, name="cairn-listeners", daemon=True).start()
        atexit.register(self._idle.wait, _LAST_SECONDS)

    def add(self, durable: tuple[str, int, int]) -> None:
        self._idle.clear()
        try:
            self._waiting.put_nowait(durable)
        except queue.Full:
            logger.warning("%s: nobody is told of step %d: %d others wait", *durable[:2], _KEPT)

    def _tell(self) -> None:
        listeners = list(_listeners())
        while True:
            if self._waiting.empty():
                self._idle.set()
            durable = self._waiting.get()
            for name, listener in listeners:
                try:
                    listener(*durable)
                except Exception:
                    logger.exception("%s was not told of step %d of %s", name, *durable[1::-1])


_telling: dict[int, _Telling] = {}
_lock = threading.Lock()


def tell(run: str, step: int, attempt: int) -> None:
    """Have the listeners told of a durable step; returns at once."""
    with _lock:  # by process: a thread does not live on in one that was forked
        telling = _telling.get(os.getpid())
        if telling is None:
            telling = _telling[os.getpid()] = _Telling()
    telling.add((run, step, attempt))


def _listeners() -> list[tuple[str, Listener]]:
    found: list[tuple[str, Listener]] = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            found.append((entry.name, entry.load()))
        except Exception:
            logger.exception("the listener %s can't be loaded", entry.value)
    return found
