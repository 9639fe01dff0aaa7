"""Exit hooks: a process ends once its saves are durable, and fails if one failed.

The interpreter stops its worker threads before it runs `atexit` callbacks, and Orbax needs those
threads. So the wait happens in `threading`'s own exit hook, which runs last in, first out and so
before that of `concurrent.futures`; the exit status is set in `atexit`, after everything else that
was registered later has run.

A preempted process that has no time left for a save calls `leave`, and waits for none. The exit
also does not wait for a call that was abandoned because a store does not answer (`outlast`): it may
never end. Nor does it wait for Orbax's threads that still ask that store, about which we get no
notice.
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
"""Exit status of a process whose last save failed without an error reaching the caller."""

LEAVE_SECONDS: Final = 3.0
"""Seconds for other packages' exit handlers in a process that `leave`s."""


_LOOP_THREADS: Final = "asyncio_"
"""Prefix of the names of asyncio's threads for blocking calls."""


class Closing(Protocol):
    """Object that has work to finish before the process ends."""

    def close(self) -> None:
        """Wait for running work; raise an error that was not reported yet."""


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
    """Forget `closing`, which is closed."""
    with _lock:
        _open.pop(id(closing), None)


def outlast(running: Callable[[], bool]) -> None:
    """Let the process end, with a failure, although a call to a silent store still runs.

    Args:
        running: True while the abandoned call runs. If neither it nor a thread of Orbax's event
            loops runs when the process ends, the exit is an ordinary one.
    """
    global _unanswered
    with _lock:
        _unanswered = True
        _endless[:] = [is_running for is_running in _endless if is_running()]
        _endless.append(running)


def leave() -> None:
    """Make the process end without waiting for saves, and with a failure.

    For a process that has abandoned a save, whose writers would hold it longer than it may live.
    The process still runs to its end, and so do the exit handlers of others.
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
        _set_status()  # multiprocessing's children run no `atexit`


def _leave() -> None:
    """End the process here, before the interpreter waits for threads that may never end."""
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
    """End the process if the interpreter still waits for an event loop's thread."""
    global _failed
    time.sleep(LEAVE_SECONDS)
    if any(thread.name.startswith(_LOOP_THREADS) for thread in threading.enumerate()):
        _failed = True
        print("cairn: a store does not answer, the process does not wait for it", file=sys.stderr)
        _set_status()


def _set_status() -> None:
    """Exit with a failure. `os._exit` is the only way to change the status this late."""
    if not _failed:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
    os._exit(FAILED_STATUS)


def _forget() -> None:
    """Clear the state in a forked child, which has none of its parent's threads."""
    global _lock, _forked, _failed, _leaving, _unanswered
    _lock, _forked = threading.Lock(), True
    _failed = _leaving = _unanswered = False
    _open.clear()
    _endless.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_set_status)
# Private, but stable from Python 3.9 on, and the only hook that runs early enough.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]  # not in typeshed
