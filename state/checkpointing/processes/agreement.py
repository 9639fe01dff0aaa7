"""Agreement of all processes of a job, on the caller's thread.

Only process 0 asks the store about runs, attempts and manifests; the others receive its decision.
An error in one process is raised in all of them, so that none waits forever.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any, TypeVar

import jax

from cairn.state.checkpointing.processes.exchange import exchange, is_primary, named
from cairn.storage import errors
from cairn.storage.errors import SaveError, StorageError

__all__ = ["agree", "all_or_none", "as_json", "collect", "compare", "from_json"]

R = TypeVar("R")


def agree(decide: Callable[..., R], *args: Any) -> R:
    """Call `decide` on process 0 and return its result on every process. All must call this.

    Args:
        decide: called on process 0 only; returns JSON.
        *args: its arguments.

    Raises:
        StorageError: `decide` raised on process 0; raised on every process.
        LateProcessError: there is a straggler.
    """
    if jax.process_count() == 1:
        return decide(*args)
    message, raised = "", None
    if is_primary():
        try:
            message = json.dumps({"value": decide(*args)})
        except Exception as exc:
            raised, message = exc, as_json(exc)
    answer = json.loads(exchange(_call_site(decide), "", lambda _: message))
    if raised is not None:
        raise raised
    if "error" in answer:
        raise from_json(answer)
    value: R = answer["value"]
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
    answer = exchange("collect", json.dumps(value), lambda messages: json.dumps([*messages]))
    return [json.loads(message) for message in json.loads(answer)]


def all_or_none(
    prepare: Callable[..., R],
    *args: Any,
    same: Callable[[R], Mapping[str, Any]] | None = None,
    error: Callable[..., Exception] = SaveError,
) -> R:
    """Return the local result of `prepare` if no process raised. All must call this.

    Args:
        prepare: may raise on some processes and not on others.
        *args: its arguments.
        same: function of the result that returns, by name, the values that must be equal on all
            processes: JSON, or anything by its `repr`.
        error: class of the error about values that differ; takes `StorageError`'s arguments.

    Raises:
        StorageError: `prepare` failed on another process.
        LateProcessError: there is a straggler.
        Exception: the error of `prepare` here, or `error`, on every process.
    """
    if jax.process_count() == 1:
        return prepare(*args)
    result, differing = _prepared(prepare, args, same)
    for name, others in differing.items():
        if others:
            raise error(
                path=name,
                expected="the same on every process",
                found=f"another value on {named(others)} than on process 0",
                next_step="All processes must make the same call; nothing was written.",
            )
    return result


def compare(prepare: Callable[..., R], *args: Any) -> tuple[R, bool]:
    """Return the local result of `prepare`, and True if all are alike. All must call this.

    Args:
        prepare: may raise on some processes and not on others; its result is compared by its
            `repr`.
        *args: its arguments.

    Raises:
        StorageError: `prepare` failed on another process.
        LateProcessError: there is a straggler.
        Exception: the error of `prepare` here.
    """
    if jax.process_count() == 1:
        return prepare(*args), True
    result, differing = _prepared(prepare, args, lambda result: {"result": repr(result)})
    return result, not differing["result"]


def _prepared(
    prepare: Callable[..., R],
    args: Sequence[Any],
    same: Callable[[R], Mapping[str, Any]] | None,
) -> tuple[R, dict[str, list[int]]]:
    """Return the local result and, for each value, the processes that differ from process 0."""
    results: list[R] = []
    raised: BaseException | None = None
    values: Mapping[str, Any] = {}
    message: dict[str, Any]
    try:
        result = prepare(*args)
        values = {} if same is None else same(result)
        message = {"digests": [_digest(value) for value in values.values()]}
        results.append(result)
    except BaseException as exc:  # an interrupt too: the others must not wait for this one
        raised, message = exc, json.loads(as_json(exc))
    answer = json.loads(exchange(_call_site(prepare), json.dumps(message), _verdict))
    if raised is not None:
        raise raised
    if "failed" in answer:
        raise from_json(answer, process=answer["failed"])
    return results[0], dict(zip(values, answer["others"], strict=True))


def _verdict(messages: Sequence[str]) -> str:
    """Return the first failure; or, for each value, the processes that differ from process 0."""
    votes = [json.loads(message) for message in messages]
    for index, vote in enumerate(votes):
        if "error" in vote:
            return json.dumps({**vote, "failed": index})
    columns = zip(*(vote["digests"] for vote in votes), strict=True)
    others = [[i for i, vote in enumerate(column) if vote != column[0]] for column in columns]
    return json.dumps({"others": others})


def _call_site(call: Callable[..., Any]) -> str:
    """Return the name of a call site, equal in all processes."""
    call = call.func if isinstance(call, partial) else call
    name = getattr(call, "__qualname__", type(call).__qualname__)
    return f"{getattr(call, '__module__', '')}.{name}"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return sha256(text.encode()).hexdigest()[:16]


def as_json(error: BaseException | None) -> str:
    """Encode an error for other processes; {} if there is none."""
    return json.dumps({} if error is None else {"error": type(error).__name__, "text": str(error)})


def from_json(message: Mapping[str, str], *, process: int = 0) -> StorageError:
    """Decode another process's error by its class name; unknown classes keep only the text."""
    kind = getattr(errors, message["error"], StorageError)
    if not (isinstance(kind, type) and issubclass(kind, StorageError)):
        kind = StorageError
    return kind(f"process {process}: {message['text']}")
