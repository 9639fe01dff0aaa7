"""A process ends only once its saves are durable, and not with success if one failed. No JAX.

The interpreter stops its worker threads before it runs `atexit` callbacks, and Orbax needs those
threads. So waiting happens in `threading`'s own exit hook, which runs last in, first out and so
before that of `concurrent.futures`; the exit status is set in `atexit`, after everything else that
was registered later has run.

A process that was told to end, and has no time left for a save, says so by `leave`: then it waits
for none. What was given up because a store does not answer (`outlast`) is not waited for either: it
may never end. Nor are threads in which Orbax still asks that store, and which nobody tells us of.
"""

import atexit
import concurrent.futures.thread  # noqa: F401  its exit hook must be registered before ours
import logging
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Final, Protocol

__all__ = ["FAILED_STATUS", "LEAVE_SECONDS", "guard", "leave", "outlast", "release"]

FAILED_STATUS: Final = 1
"""Exit status of a process whose last save failed without anyone having been told."""

LEAVE_SECONDS: Final = 3.0
"""How long the exit handlers of others may take in a process that `leave`s."""


_LOOP_THREADS: Final = "asyncio_"
"""The beginning of the names that asyncio gives threads to which a loop hands blocking calls."""


class Closing(Protocol):
    """What can be finished before the process ends."""

    def close(self) -> None:
        """Wait for what is under way; raise what failed and was not reported."""


_open: dict[int, Closing] = {}
_endless: list[Callable[[], bool]] = []
_lock = threading.Lock()
_forked = False
_failed = False
_leaving = False
_unanswered = False


def guard(closing: Closing) -> None:
    """Close `closing` before the process ends, unless it is released first."""
    with _lock:
        _open[id(closing)] = closing


def release(closing: Closing) -> None:
    """Forget `closing`: it is closed."""
    with _lock:
        _open.pop(id(closing), None)


def outlast(running: Callable[[], bool]) -> None:
    """Have the process end, with a failure, although something still asks a silent store.

    Args:
        running: whether what was given up does. If neither it nor a thread of Orbax's event loops
            does when the process ends, nothing is changed.
    """
    global _unanswered
    with _lock:
        _unanswered = True
        _endless[:] = [one for one in _endless if one()]
        _endless.append(running)


def leave() -> None:
    """From now on the process ends without waiting for saves, and with a failure.

    For one that has given up on a save: what still writes it would hold the process for longer
    than it has. It still runs to its end by itself, and so do the exit handlers of others.
    """
    global _leaving
    _leaving = True


def _close_all() -> None:
    global _failed
    if _leaving:
        _leave()
    while True:
        with _lock:
            if not _open:
                break
            _, closing = _open.popitem()
        try:
            closing.close()
        except BaseException:
            _failed = True
            traceback.print_exc()
    if any(running() for running in _endless):
        _leave()
    if _unanswered:
        threading.Thread(target=_leave_asking, name="cairn-leave", daemon=True).start()
    if _forked and multiprocessing.parent_process() is not None:
        _set_status()  # such a process ends without `atexit`


def _leave() -> None:
    """End here, before the interpreter would wait for threads that may never come to an end."""
    global _failed
    _failed = True
    print("cairn: a save was abandoned, the process does not wait for it", file=sys.stderr)

    def limit() -> None:
        time.sleep(LEAVE_SECONDS)
        _set_status()

    threading.Thread(target=limit, name="cairn-leave", daemon=True).start()
    atexit._run_exitfuncs()
    _set_status()


def _leave_asking() -> None:
    """End here if the interpreter still waits for a thread of an event loop, which may hang."""
    global _failed
    time.sleep(LEAVE_SECONDS)
    if any(thread.name.startswith(_LOOP_THREADS) for thread in threading.enumerate()):
        _failed = True
        print("cairn: a store does not answer, the process does not wait for it", file=sys.stderr)
        _set_status()


def _set_status() -> None:
    """Leave with a failure. `os._exit` is the only way to change the status this late."""
    if not _failed:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(FAILED_STATUS)


def _forget() -> None:
    """A forked child has none of its parent's threads: it guards what it opens itself."""
    global _lock, _forked, _failed, _leaving, _unanswered
    _lock, _forked = threading.Lock(), True
    _failed = _leaving = _unanswered = False
    _open.clear()
    _endless.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_set_status)
# Private, but stable from Python 3.9 on, and the only hook that runs early enough.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # not in typeshed
