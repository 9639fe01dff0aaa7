"""Listeners for durable steps: functions that installed packages register.

A package registers a listener in the entry point group `cairn.durable_steps`. A background thread
calls all listeners, one after the other; neither saves nor training wait for it. Calls can get
lost: to be sure of a run's steps, read them from the store.
"""

import atexit
import importlib.metadata
import logging
import os
import queue
import threading
from collections.abc import Callable
from typing import Final

__all__ = ["GROUP", "Listener", "publish"]

logger = logging.getLogger(__name__)

GROUP: Final = "cairn.durable_steps"

Listener = Callable[[str, int, int], None]
"""Function that is called with a run's URI, a step that is now durable, and the step's attempt."""

_KEPT: Final = 1000
"""Length of the queue; when it is full, further steps are dropped."""

_LAST_SECONDS: Final = 1.0
"""Seconds that the process waits for listeners at exit."""


class _Publisher:
    """Thread that calls the listeners, started with the first durable step."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[str, int, int]] = queue.Queue(_KEPT)
        self._idle = threading.Event()
        threading.Thread(target=self._publish, name="cairn-listeners", daemon=True).start()
        atexit.register(self._idle.wait, _LAST_SECONDS)

    def add(self, durable: tuple[str, int, int]) -> None:
        self._idle.clear()
        try:
            self._waiting.put_nowait(durable)
        except queue.Full:
            logger.warning("%s: nobody is told of step %d: others waiting: %d", *durable[:2], _KEPT)

    def _publish(self) -> None:
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


_publishers: dict[int, _Publisher] = {}
_lock = threading.Lock()


def publish(run: str, step: int, attempt: int) -> None:
    """Queue a durable step for the listeners and return at once."""
    with _lock:  # one per process: a forked child lacks its parent's thread
        publisher = _publishers.get(os.getpid())
        if publisher is None:
            publisher = _publishers[os.getpid()] = _Publisher()
    publisher.add((run, step, attempt))


def _listeners() -> list[tuple[str, Listener]]:
    listeners: list[tuple[str, Listener]] = []
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            listeners.append((entry.name, entry.load()))
        except Exception:
            logger.exception("the listener %s can't be loaded", entry.value)
    return listeners
