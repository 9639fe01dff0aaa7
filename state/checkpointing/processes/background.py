"""Messages between a job's processes in the background, where no device may be used.

Unlike the numbered rounds of `exchange`, each message has its own key: several exchanges may run at
a time.
"""

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

import jax

from cairn.state.checkpointing.processes.agreement import as_json, from_json
from cairn.state.checkpointing.processes.coordination import Coordination, coordination
from cairn.state.checkpointing.processes.exchange import (
    LATE_SECONDS,
    MOST_NAMED,
    POLL_SECONDS,
    absent,
    is_primary,
    is_set,
    named,
)
from cairn.state.checkpointing.processes.straggler_log import StragglerLog
from cairn.storage.errors import LateProcessError, SaveError
from cairn.storage.store.deadlines import set_outcome

__all__ = [
    "MEET_SECONDS",
    "OUTCOME_SECONDS",
    "collective",
    "meet",
    "report_failure",
    "save_key",
    "share_outcome",
    "wait_for",
]

OUTCOME_SECONDS: Final = 1200
"""Seconds that the other processes wait for process 0 to publish a step."""

MEET_SECONDS: Final = LATE_SECONDS
"""Seconds that processes wait in `meet` for one that is late but has reported no failure."""

R = TypeVar("R")


def wait_for(work: Callable[[], R], key: str) -> R:
    """Run `work` in a thread and return its result; stop waiting if another process failed.

    Args:
        work: function that waits for other processes, perhaps forever if one fails.
        key: key under which processes report failures, see `report_failure`.

    Raises:
        StorageError: another process reported a failure; the thread of `work` goes on.
        BaseException: `work` failed.
    """
    if jax.process_count() == 1:
        return work()
    outcome: Future[R] = Future()
    arguments = (outcome, work)
    threading.Thread(target=set_outcome, args=arguments, name=f"wait {key}", daemon=True).start()
    client = coordination()
    while not wait([outcome], POLL_SECONDS).done:
        _raise_reported(client, key)
    return outcome.result()


_collectives: Final = itertools.count()


def collective(work: Callable[[], R], place: str) -> R:
    """Run a collective of all processes with a deadline, and return its result.

    All processes must call this, in the same order. After the deadline the collective goes on in
    its thread, since it can't be stopped.

    Args:
        work: function that runs the collective, over the network of the devices.
        place: name of the call site, for the log and for errors.

    Raises:
        LateProcessError: the collective did not end within `LATE_SECONDS`; names the processes
            that did not call this.
        StorageError: `work` failed on another process.
        BaseException: `work` failed on this process.
    """
    if jax.process_count() == 1:
        return work()
    client, number = coordination(), next(_collectives)
    key = f"cairn/collective/{number}"
    if is_primary():  # no process needs the earlier key any more
        client.key_value_delete(f"cairn/collective/{number - 1}/")
    client.key_value_set(f"{key}/at/{jax.process_index()}", "here")
    outcome: Future[R] = Future()
    arguments = (outcome, work)
    threading.Thread(target=set_outcome, args=arguments, name=key, daemon=True).start()
    stragglers = StragglerLog(place)
    while not wait([outcome], POLL_SECONDS).done:
        _raise_reported(client, key)
        if stragglers.waited(lambda: named(absent(client, f"{key}/at")) or "all") > LATE_SECONDS:
            late = absent(client, f"{key}/at")
            raise LateProcessError(
                path=place,
                expected=f"an exchange of all {jax.process_count()} processes "
                f"within {LATE_SECONDS:.0f} s",
                found=f"{named(late)} missing" if late else "all there, and no end of it",
                next_step="See their logs, and the network of their devices.",
            )
    error = outcome.exception()
    if error is not None:
        report_failure(key, error)
    return outcome.result()


def meet(key: str, place: str, *, seconds: float = MEET_SECONDS) -> None:
    """Wait at a barrier until every process has called this. Uses no device.

    If a process dies, JAX's coordination service ends the others.

    Args:
        key: key of the save, see `save_key`; processes report failures under it.
        place: name of the barrier, the same on all processes; used once per key.
        seconds: maximum seconds to wait.

    Raises:
        StorageError: another process reported a failure.
        SaveError: a process did not call this in time.
    """
    if jax.process_count() == 1:
        return
    client = coordination()
    arrivals, all_there = f"{key}/{place}/at", f"{key}/{place}/all"
    client.key_value_set(f"{arrivals}/{jax.process_index()}", "here")
    stragglers = StragglerLog(f"{place!r} of a save ({key})")

    def whom() -> str:
        if is_primary() or jax.process_count() <= MOST_NAMED:
            return named(absent(client, arrivals))
        return "others, whom the log of process 0 names"

    while not _all_met(client, arrivals, all_there):
        _raise_reported(client, key)
        if stragglers.waited(whom) > seconds:
            raise SaveError(
                "some processes did not come",
                path=key,
                expected=f"all {jax.process_count()} at {place!r} within {seconds:.0f} s",
                found=named(absent(client, arrivals)) + " missing",
                next_step="See their logs.",
            )


def _all_met(client: Coordination, arrivals: str, all_there: str) -> bool:
    """Return True if all processes are at the barrier; wait at most `POLL_SECONDS` for them.

    Process 0 looks at the arrivals and sets `all_there`; the others wait for that key only.
    """
    if not is_primary():
        return is_set(client, all_there)
    missing = absent(client, arrivals)
    if missing and is_set(client, f"{arrivals}/{missing[0]}"):
        missing = absent(client, arrivals)
    if missing:
        return False
    client.key_value_set(all_there, "here")
    client.key_value_delete(f"{arrivals}/")
    return True


def _raise_reported(client: Coordination, key: str) -> None:
    """Raise the failure that a process has reported under `key`; do nothing if there is none."""
    report = client.key_value_try_get(_failure_key(key))
    if report is not None:
        failure = json.loads(report)
        raise from_json(failure, process=failure["process"])


def save_key(step_folder: object, save: str) -> str:
    """Return the key for messages between a job's processes about one save.

    Args:
        step_folder: the step's folder. It is not unique: a deleted run may have had the same.
        save: unique id of this save.
    """
    return f"cairn/{step_folder}/{save}"


def report_failure(key: str, error: BaseException) -> None:
    """Report a failure under `key` to all processes that wait with it; only the first counts."""
    if jax.process_count() == 1:
        return
    report = {**json.loads(as_json(error)), "process": int(jax.process_index())}
    try:
        coordination().key_value_set(_failure_key(key), json.dumps(report))
    except Exception:
        return  # another process reported first, or the service is gone


def share_outcome(key: str, error: BaseException | None) -> None:
    """Send the outcome of publishing a step from process 0 to all; the others wait for it.

    Args:
        key: key of the message, the same on all processes, used once.
        error: on process 0, the error of publishing, None if it succeeded; ignored on the others.

    Raises:
        StorageError: publishing failed; raised on all processes except process 0.
        SaveError: process 0 sent nothing for `OUTCOME_SECONDS`.
    """
    if jax.process_count() == 1:
        return
    client = coordination()
    if is_primary():
        client.key_value_set(key, as_json(error))
        return
    stragglers = StragglerLog(f"the end of a save ({key})")
    try:
        while not is_set(client, key):
            if stragglers.waited(lambda: "process 0, which publishes") > OUTCOME_SECONDS:
                raise TimeoutError("none came")
        outcome = json.loads(client.blocking_key_value_get(key, POLL_SECONDS))
    except Exception as exc:
        raise SaveError(
            "process 0 did not say whether the step was published",
            path=key,
            expected=f"an answer within {OUTCOME_SECONDS} s",
            found=f"{type(exc).__name__}: {exc}",
            next_step="See the log of process 0.",
        ) from exc
    if "error" in outcome:
        raise from_json(outcome)


def _failure_key(key: str) -> str:
    return f"{key}/failed"
