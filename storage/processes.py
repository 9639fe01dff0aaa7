"""Agreement between the processes of one job. Imports JAX; in a job of one process all is local.

Process 0 alone talks to the store about runs, attempts and manifests. What it decided reaches the
others by a broadcast (in `save`, on the caller's thread) or through the coordination service (in
the background, where no device may be used).
"""

import json
from collections.abc import Callable
from typing import Final, TypeVar, cast

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint._src.futures import signaling_client

from storage import errors
from storage.errors import SaveError, StorageError

__all__ = ["OUTCOME_SECONDS", "agree", "is_primary", "share_outcome", "together"]

OUTCOME_SECONDS: Final = 1200
"""How long the other processes wait for process 0 to publish a step."""

R = TypeVar("R")


def is_primary() -> bool:
    """True in the process that talks to the store for all."""
    return int(jax.process_index()) == 0


def agree(decide: Callable[[], int]) -> int:
    """The number that `decide` gives on process 0, on every process. All of them must call this.

    Raises:
        StorageError: `decide` raised it on process 0; it is raised on every process.
    """
    if jax.process_count() == 1:
        return decide()
    said, raised = b"", None
    if is_primary():
        try:
            said = json.dumps({"value": decide()}).encode()
        except Exception as exc:
            raised = exc
            said = _as_json(exc).encode()
    size = int(multihost_utils.broadcast_one_to_all(np.int32(len(said))))
    padded = np.zeros(size, np.uint8)
    padded[: len(said)] = np.frombuffer(said, np.uint8)
    heard = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded)).tobytes())
    if raised is not None:
        raise raised
    if "error" in heard:
        raise _from_json(heard)
    return int(heard["value"])


def together(prepare: Callable[[], R]) -> R:
    """What `prepare` gives on this process, if it raises on none. All of them must call this.

    Raises:
        StorageError: another process could not do it.
        Exception: what it raised here.
    """
    if jax.process_count() == 1:
        return prepare()
    prepared: R | None = None
    raised: Exception | None = None
    try:
        prepared = prepare()
    except Exception as exc:
        raised = exc
    failed = np.flatnonzero(multihost_utils.process_allgather(np.int32(raised is not None)))
    if raised is not None:
        raise raised
    if failed.size:
        raise SaveError(
            "another process could not start the save",
            expected="all processes to be ready",
            found=f"process {', '.join(map(str, failed))} not",
            next_step="See the error there; nothing was written.",
        )
    return cast("R", prepared)


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
    client = signaling_client.get_signaling_client()
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


def _as_json(error: BaseException | None) -> str:
    return json.dumps({} if error is None else {"error": type(error).__name__, "text": str(error)})


def _from_json(heard: dict[str, str]) -> StorageError:
    """The error of process 0, by the name of its class; of unknown ones only the text."""
    kind = getattr(errors, heard["error"], SaveError)
    known = kind if isinstance(kind, type) and issubclass(kind, StorageError) else SaveError
    return known(f"process 0: {heard['text']}")
