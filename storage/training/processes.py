"""Agreement between the processes of one job. Imports JAX; in a job of one process all is local.

Process 0 alone talks to the store about runs, attempts and manifests. What it decided reaches the
others by a broadcast (`agree`, on the caller's thread) or through the coordination service (in the
background, where no device may be used). Whatever fails in one process fails in all of them:
nobody is left waiting at the next barrier.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from cairn.storage import errors
from cairn.storage.errors import SaveError, StorageError
from cairn.storage.training.coordination import Coordination, coordination

__all__ = [
    "MEET_SECONDS",
    "OUTCOME_SECONDS",
    "POLL_SECONDS",
    "agree",
    "is_primary",
    "meet",
    "report_failure",
    "save_key",
    "share_outcome",
    "together",
    "wait_for",
]

OUTCOME_SECONDS: Final = 1200
"""How long the other processes wait for process 0 to publish a step."""

MEET_SECONDS: Final = 3600.0
"""How long the processes wait for one that is alive, has not failed, and does not come."""

POLL_SECONDS: Final = 1
"""How often a process that waits for others asks whether one of them has failed."""

R = TypeVar("R")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def is_primary() -> bool:
    """True in the process that talks to the store for all."""
    return int(jax.process_index()) == 0


def agree(decide: Callable[[], R]) -> R:
    """What `decide` gives on process 0, on every process. All of them must call this.

    Args:
        decide: called on process 0 only; gives JSON.

    Raises:
        StorageError: `decide` raised on process 0; it is raised on every process.
    """
    if jax.process_count() == 1:
        return decide()
    said, raised = "", None
    if is_primary():
        try:
            said = json.dumps({"value": decide()})
        except Exception as exc:
            raised, said = exc, _as_json(exc)
    heard = json.loads(_broadcast(said, source=0))
    if raised is not None:
        raise raised
    if "error" in heard:
        raise _from_json(heard)
    value: R = heard["value"]
    return value


def together(
    prepare: Callable[[], R],
    *,
    same: Mapping[str, Callable[[R], Any]] = _NOTHING,
    error: Callable[..., Exception] = SaveError,
) -> R:
    """What `prepare` gives on this process, if it raises on none. All of them must call this.

    Args:
        prepare: may raise on some processes and not on others.
        same: name -> what of the prepared must be equal on all processes; JSON, or any `repr`.
        error: makes the error about values that differ, as errors of ours are made.

    Raises:
        StorageError: another process could not do it.
        Exception: what it raised here, or `error`, on every process.
    """
    if jax.process_count() == 1:
        return prepare()
    prepared: list[R] = []
    raised: Exception | None = None
    digests = np.zeros((1 + len(same), 8), np.uint8)
    try:
        made = prepare()
        for row, value_of in enumerate(same.values(), start=1):
            digests[row] = _digest(value_of(made))
        prepared.append(made)
    except Exception as exc:
        raised = exc
        digests[0] = 1
    votes = np.asarray(multihost_utils.process_allgather(digests))
    failed = np.flatnonzero(votes[:, 0, 0])
    if failed.size:
        first = int(failed[0])
        heard = _broadcast("" if raised is None else _as_json(raised), source=first)
        raise raised if raised is not None else _from_json(json.loads(heard), process=first)
    for row, name in enumerate(same, start=1):
        others = np.flatnonzero((votes[:, row] != votes[0, row]).any(axis=1)).tolist()
        if others:
            raise error(
                path=name,
                expected="the same on every process",
                found=f"another value on {_processes(others)} than on process 0",
                next_step="All processes must make the same call; nothing was written.",
            )
    return prepared[0]


def wait_for(work: Callable[[], R], key: str) -> R:
    """What `work` gives, done in the background; gives up on it once another process has failed.

    Args:
        work: waits for the other processes at some point.
        key: of the failure, see `report_failure`.

    Raises:
        StorageError: another process reported a failure; `work` goes on in a thread of its own.
        BaseException: what `work` raised.
    """
    if jax.process_count() == 1:
        return work()
    outcome: Future[R] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as exc:
            outcome.set_exception(exc)

    threading.Thread(target=run, name=f"wait {key}", daemon=True).start()
    client = coordination()
    while not wait([outcome], POLL_SECONDS).done:
        _raise_reported(client, key)
    return outcome.result()


def meet(key: str, place: str, *, seconds: float = MEET_SECONDS) -> None:
    """Wait until every process is at `place`; give up once one has failed. Uses no device.

    One that dies is noticed by JAX's coordination service, which then ends the others.

    Args:
        key: of the failure, see `report_failure`.
        place: the same on all processes, met at once only.
        seconds: how long to wait for one that neither comes nor fails.

    Raises:
        StorageError: another process reported a failure.
        SaveError: some did not come in time.
    """
    if jax.process_count() == 1:
        return
    client = coordination()
    arrivals, all_there = f"{key}/{place}/at", f"{key}/{place}/all"
    client.key_value_set(f"{arrivals}/{jax.process_index()}", "here")
    deadline = time.monotonic() + seconds
    while not _all_met(client, arrivals, all_there):
        _raise_reported(client, key)
        if time.monotonic() > deadline:
            raise SaveError(
                "some processes did not come",
                path=key,
                expected=f"all {jax.process_count()} at {place!r} within {seconds:.0f} s",
                found=_processes(_absent(client, arrivals)) + " missing",
                next_step="See their logs.",
            )


def _all_met(client: Coordination, arrivals: str, all_there: str) -> bool:
    """Whether all have come, after at most `POLL_SECONDS`. Process 0 counts, and tells the rest."""
    if not is_primary():
        return _is_set(client, all_there)
    absent = _absent(client, arrivals)
    if absent and _is_set(client, f"{arrivals}/{absent[0]}"):
        absent = _absent(client, arrivals)
    if absent:
        return False
    client.key_value_set(all_there, "here")
    client.key_value_delete(f"{arrivals}/")
    return True


def _absent(client: Coordination, arrivals: str) -> list[int]:
    there = {name.rpartition("/")[2] for name, _ in client.key_value_dir_get(f"{arrivals}/")}
    return [index for index in range(jax.process_count()) if str(index) not in there]


def _is_set(client: Coordination, name: str) -> bool:
    """Whether a key has a value, after at most `POLL_SECONDS`."""
    try:
        client.blocking_key_value_get(name, POLL_SECONDS)
    except jax.errors.JaxRuntimeError as exc:
        if "DEADLINE_EXCEEDED" not in str(exc):
            raise
        return False
    return True


def _raise_reported(client: Coordination, key: str) -> None:
    """Raise what another process, or this one, has reported under `key`."""
    said = client.key_value_try_get(_failure_key(key))
    if said is not None:
        heard = json.loads(said)
        raise _from_json(heard, process=heard["process"])


def save_key(step_folder: object, save: str) -> str:
    """Under what the processes of a job meet for a save; each is used once.

    Args:
        step_folder: where to; another run may have had it, which was deleted since.
        save: tells this save from all others.
    """
    return f"cairn/{step_folder}/{save}"


def report_failure(key: str, error: BaseException) -> None:
    """Let those that `wait_for` this know that it will not come. The first report stays."""
    if jax.process_count() == 1:
        return
    said = {**json.loads(_as_json(error)), "process": int(jax.process_index())}
    try:
        coordination().key_value_set(_failure_key(key), json.dumps(said))
    except Exception:
        return  # another process has failed too and said so, or nobody can be told any more


def share_outcome(key: str, error: BaseException | None) -> None:
    """Tell the others how publishing ended (process 0), or wait to be told (the others).

    Args:
        key: the same on all processes, used once.
        error: on process 0, what went wrong, if anything.

    Raises:
        StorageError: on the other processes, what went wrong on process 0.
        SaveError: process 0 said nothing for `OUTCOME_SECONDS`.
    """
    if jax.process_count() == 1:
        return
    client = coordination()
    if is_primary():
        client.key_value_set(key, _as_json(error))
        return
    try:
        heard = json.loads(client.blocking_key_value_get(key, OUTCOME_SECONDS))
    except Exception as exc:
        raise SaveError(
            "process 0 did not say whether the step was published",
            path=key,
            expected=f"an answer within {OUTCOME_SECONDS} s",
            found=f"{type(exc).__name__}: {exc}",
            next_step="See the log of process 0.",
        ) from exc
    if "error" in heard:
        raise _from_json(heard)


def _broadcast(text: str, *, source: int) -> str:
    """The text of process `source`, on every process."""
    is_source = int(jax.process_index()) == source
    said = np.frombuffer(text.encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(said.size), is_source=is_source))
    padded = np.zeros(size, np.uint8)
    padded[: min(said.size, size)] = said[:size]
    heard = multihost_utils.broadcast_one_to_all(padded, is_source=is_source)
    return np.asarray(heard).tobytes().decode()


def _digest(value: Any) -> np.ndarray[Any, Any]:
    text = json.dumps(value, sort_keys=True, default=repr)
    return np.frombuffer(sha256(text.encode()).digest()[:8], np.uint8)


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _failure_key(key: str) -> str:
    return f"{key}/failed"


def _as_json(error: BaseException | None) -> str:
    return json.dumps({} if error is None else {"error": type(error).__name__, "text": str(error)})


def _from_json(heard: Mapping[str, str], *, process: int = 0) -> StorageError:
    """The error of another process, by the name of its class; of unknown ones only the text."""
    kind = getattr(errors, heard["error"], StorageError)
    known = kind if isinstance(kind, type) and issubclass(kind, StorageError) else StorageError
    return known(f"process {process}: {heard['text']}")
