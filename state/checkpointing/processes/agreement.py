"""Agreement of all processes of a job, on the caller's thread.

Only process 0 asks the store about runs, attempts and manifests; the others receive its decision.
An error in one process is raised in all of them, so that none waits forever.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, TypeVar

import jax

from cairn.state.checkpointing.processes.exchange import exchange, is_primary, named
from cairn.storage import errors
from cairn.storage.errors import SaveError, StorageError

__all__ = ["agree", "as_json", "collect", "compare", "from_json", "together"]

R = TypeVar("R")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def agree(decide: Callable[[], R]) -> R:
    """Call `decide` on process 0 and return its result on every process. All must call this.

    Args:
        decide: called on process 0 only; returns JSON.

    Raises:
        StorageError: `decide` raised on process 0; raised on every process.
        LateProcessError: there is a straggler.
    """
    if jax.process_count() == 1:
        return decide()
    said, raised = "", None
    if is_primary():
        try:
            said = json.dumps({"value": decide()})
        except Exception as exc:
            raised, said = exc, as_json(exc)
    heard = json.loads(exchange(_place(decide), "", lambda _: said))
    if raised is not None:
        raise raised
    if "error" in heard:
        raise from_json(heard)
    value: R = heard["value"]
    return value


def collect(value: Any) -> list[Any]:
    """Return the values of all processes, in order, on every process. All must call this.

    Args:
        value: JSON, a few KiB.

    Raises:
        LateProcessError: there is a straggler.
    """
    if jax.process_count() == 1:
        return [value]
    heard = exchange("collect", json.dumps(value), lambda said: json.dumps([*said]))
    return [json.loads(one) for one in json.loads(heard)]


def together(
    prepare: Callable[[], R],
    *,
    same: Mapping[str, Callable[[R], Any]] = _NOTHING,
    error: Callable[..., Exception] = SaveError,
) -> R:
    """Return the local result of `prepare` if no process raised. All must call this.

    Args:
        prepare: may raise on some processes and not on others.
        same: name -> function of the result whose value must be equal on all processes; JSON, or
            any `repr`.
        error: class of the error about values that differ; takes `StorageError`'s arguments.

    Raises:
        StorageError: `prepare` failed on another process.
        LateProcessError: there is a straggler.
        Exception: the error of `prepare` here, or `error`, on every process.
    """
    if jax.process_count() == 1:
        return prepare()
    made, columns = _prepared(prepare, same.values())
    for name, others in zip(same, columns, strict=True):
        if others:
            raise error(
                path=name,
                expected="the same on every process",
                found=f"another value on {named(others)} than on process 0",
                next_step="All processes must make the same call; nothing was written.",
            )
    return made


def compare(prepare: Callable[[], R], value_of: Callable[[R], Any]) -> tuple[R, bool]:
    """Return the local result of `prepare`, and True if all are alike. All must call this.

    Args:
        prepare: may raise on some processes and not on others.
        value_of: function of the result that is compared; JSON, or any `repr`.

    Raises:
        StorageError: `prepare` failed on another process.
        LateProcessError: there is a straggler.
        Exception: the error of `prepare` here.
    """
    if jax.process_count() == 1:
        return prepare(), True
    made, (others,) = _prepared(prepare, [value_of])
    return made, not others


def _prepared(
    prepare: Callable[[], R], values_of: Collection[Callable[[R], Any]]
) -> tuple[R, list[list[int]]]:
    """Return the local result and, for each value, the processes that differ from process 0."""
    prepared: list[R] = []
    raised: BaseException | None = None
    said: dict[str, Any]
    try:
        made = prepare()
        said = {"digests": [_digest(value_of(made)) for value_of in values_of]}
        prepared.append(made)
    except BaseException as exc:  # an interrupt too: the others must not wait for this one
        raised, said = exc, json.loads(as_json(exc))
    heard = json.loads(exchange(_place(prepare), json.dumps(said), _verdict))
    if raised is not None:
        raise raised
    if "failed" in heard:
        raise from_json(heard, process=heard["failed"])
    others: list[list[int]] = heard["others"]
    return prepared[0], others


def _verdict(said: Sequence[str]) -> str:
    """Return the first failure; or, for each value, the processes that differ from process 0."""
    votes = [json.loads(one) for one in said]
    for index, vote in enumerate(votes):
        if "error" in vote:
            return json.dumps({**vote, "failed": index})
    columns = zip(*(vote["digests"] for vote in votes), strict=True)
    others = [[i for i, one in enumerate(column) if one != column[0]] for column in columns]
    return json.dumps({"others": others})


def _place(call: Callable[..., Any]) -> str:
    """Return the name of a call site, equal in all processes."""
    name = getattr(call, "__qualname__", type(call).__qualname__)
    return f"{getattr(call, '__module__', '')}.{name}".replace(".<locals>.<lambda>", "")


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return sha256(text.encode()).hexdigest()[:16]


def as_json(error: BaseException | None) -> str:
    """Encode an error for other processes; {} if there is none."""
    return json.dumps({} if error is None else {"error": type(error).__name__, "text": str(error)})


def from_json(heard: Mapping[str, str], *, process: int = 0) -> StorageError:
    """Decode another process's error by its class name; unknown classes keep only the text."""
    kind = getattr(errors, heard["error"], StorageError)
    known = kind if isinstance(kind, type) and issubclass(kind, StorageError) else StorageError
    return known(f"process {process}: {heard['text']}")
