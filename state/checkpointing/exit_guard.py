"""Exit hooks: a process ends once its saves are durable, with a failure status if one failed.

The interpreter stops worker threads of `concurrent.futures` before it runs `atexit` callbacks, and
Orbax needs those threads. So the process waits for saves in an exit hook of `threading`: those run
in reverse order of registration, so ours runs before that of `concurrent.futures`. The exit status
is set in an `atexit` callback, after callbacks that were registered later have run.

Some work is not waited for, since it may never end: saves in a preempted process that has no time
left (it calls `leave`), calls that were abandoned because a store does not respond (`outlast`), and
Orbax's threads that still wait for that store, which do not report to us.
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
"""Exit status of a process if a save failed whose error no call has raised."""

LEAVE_SECONDS: Final = 3.0
"""Seconds for other packages' exit handlers in a process that `leave`s."""


_LOOP_THREADS: Final = "asyncio_"
"""Prefix of the names of threads in which asyncio runs blocking calls."""


class Closing(Protocol):
    """Object that has work to finish before the process ends."""

    def close(self) -> None:
        """Wait for running work; raise its error if no call has raised that yet."""


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
    """Undo `guard`: `closing` needs no call of `close` at exit any more."""
    with _lock:
        _open.pop(id(closing), None)


def outlast(running: Callable[[], bool]) -> None:
    """Let the process end although an abandoned call still waits for a store that does not respond.

    If the call or one of Orbax's event loop threads still runs at exit, the status is
    `FAILED_STATUS`; else this changes nothing.

    Args:
        running: function that returns True while the abandoned call runs.
    """
    global _unanswered
    with _lock:
        _unanswered = True
        _endless[:] = [is_running for is_running in _endless if is_running()]
        _endless.append(running)


def leave() -> None:
    """Skip the wait for saves when the process exits, and set its status to `FAILED_STATUS`.

    This call itself does not end the process. It is meant for a preempted process that abandoned a
    save: waiting for the save's threads would take longer than the process may run. At exit, the
    `atexit` callbacks of other packages get `LEAVE_SECONDS`.
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
    """End the process now, before the interpreter waits for threads that may never end."""
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
    """After `LEAVE_SECONDS`, end the process if an asyncio thread still keeps it from ending."""
    global _failed
    time.sleep(LEAVE_SECONDS)
    if any(thread.name.startswith(_LOOP_THREADS) for thread in threading.enumerate()):
        _failed = True
        print("cairn: a store does not answer, the process does not wait for it", file=sys.stderr)
        _set_status()


def _set_status() -> None:
    """End the process with `FAILED_STATUS` if something failed; else do nothing.

    `os._exit` is the only way to change the status this late.
    """
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
