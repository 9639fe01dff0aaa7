"""What all processes of a job agree on, on the caller's thread.

Process 0 alone talks to the store about runs, attempts and manifests; what it decided reaches the
others. Whatever fails in one process fails in all of them: nobody is left waiting.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import Any, Final, TypeVar

import jax

from cairn.storage import errors
from cairn.storage.errors import SaveError, StorageError
from cairn.storage.training.processes.exchange import exchange, is_primary, named

__all__ = ["agree", "as_json", "collect", "compare", "from_json", "together"]

R = TypeVar("R")
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def agree(decide: Callable[[], R]) -> R:
    """What `decide` gives on process 0, on every process. All of them must call this.

    Args:
        decide: called on process 0 only; gives JSON.

    Raises:
        StorageError: `decide` raised on process 0; it is raised on every process.
        LateProcessError: some process did not come.
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
    """What each process gives, by process, on every process. All of them must call this.

    Args:
        value: JSON, a few KiB.

    Raises:
        LateProcessError: some process did not come.
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
    """What `prepare` gives on this process, if it raises on none. All of them must call this.

    Args:
        prepare: may raise on some processes and not on others.
        same: name -> what of the prepared must be equal on all processes; JSON, or any `repr`.
        error: makes the error about values that differ, as errors of ours are made.

    Raises:
        StorageError: another process could not do it.
        LateProcessError: some process did not come.
        Exception: what it raised here, or `error`, on every process.
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
    """What `prepare` gives here, and whether it is alike on all. All of them must call this.

    Args:
        prepare: may raise on some processes and not on others.
        value_of: what of the prepared is compared; JSON, or any `repr`.

    Raises:
        StorageError: another process could not do it.
        LateProcessError: some process did not come.
        Exception: what it raised here.
    """
    if jax.process_count() == 1:
        return prepare(), True
    made, (others,) = _prepared(prepare, [value_of])
    return made, not others


def _prepared(
    prepare: Callable[[], R], values_of: Collection[Callable[[R], Any]]
) -> tuple[R, list[list[int]]]:
    """What is prepared here; for each value of it, the processes that have another than 0."""
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
    """The first failure; or, for each value, the processes that have another than process 0."""
    votes = [json.loads(one) for one in said]
    for index, vote in enumerate(votes):
        if "error" in vote:
            return json.dumps({**vote, "failed": index})
    columns = zip(*(vote["digests"] for vote in votes), strict=True)
    others = [[i for i, one in enumerate(column) if one != column[0]] for column in columns]
    return json.dumps({"others": others})


def _place(call: Callable[..., Any]) -> str:
    """Where a call stands in the program, the same in all processes."""
    name = getattr(call, "__qualname__", type(call).__qualname__)
    return f"{getattr(call, '__module__', '')}.{name}".replace(".<locals>.<lambda>", "")


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return sha256(text.encode()).hexdigest()[:16]


def as_json(error: BaseException | None) -> str:
    """An error as another process hears of it; {} if there is none."""
    return json.dumps({} if error is None else {"error": type(error).__name__, "text": str(error)})


def from_json(heard: Mapping[str, str], *, process: int = 0) -> StorageError:
    """The error of another process, by the name of its class; of unknown ones only the text."""
    kind = getattr(errors, heard["error"], StorageError)
    known = kind if isinstance(kind, type) and issubclass(kind, StorageError) else StorageError
    return known(f"process {process}: {heard['text']}")
