"""Calls in which all processes of a job exchange results and errors, on the caller's thread.

Only process 0 reads runs, attempts and manifests from the store and decides; the others receive its
decision. An error in one process is raised in all of them, so that none waits forever.
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
        decide: function that is called on process 0 only, and returns JSON.
        *args: arguments of `decide`.

    Raises:
        StorageError: `decide` failed on process 0; raised on every process.
        LateProcessError: a process did not call this in time.
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
        value: this process's value: JSON, a few KiB.

    Raises:
        LateProcessError: a process did not call this in time.
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
        prepare: function that is called on each process; it may raise on some of them only.
        *args: arguments of `prepare`.
        same: function from the result to values, by name, that must be equal on all processes.
            They are compared as JSON, with the `repr` of what JSON can't express.
        error: class of the error if such values differ; takes `StorageError`'s arguments.

    Raises:
        StorageError: `prepare` failed on another process.
        LateProcessError: a process did not call this in time.
        Exception: `prepare` failed on this process, or, of the class `error`, values differ;
            the latter is raised on every process.
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
    """Return the local result of `prepare`, and True if it is equal on all. All must call this.

    Args:
        prepare: function that is called on each process; it may raise on some of them only. Its
            results are compared by their `repr`.
        *args: arguments of `prepare`.

    Raises:
        StorageError: `prepare` failed on another process.
        LateProcessError: a process did not call this in time.
        Exception: `prepare` failed on this process.
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
    """Return the local result and, for each value of `same`, the processes that differ from 0.

    Raises the errors of `all_or_none`, except `error`.
    """
    results: list[R] = []
    raised: BaseException | None = None
    values: Mapping[str, Any] = {}
    message: dict[str, Any]
    try:
        result = prepare(*args)
        values = {} if same is None else same(result)
        texts = [json.dumps(value, sort_keys=True, default=repr) for value in values.values()]
        message = {"digests": [sha256(text.encode()).hexdigest()[:16] for text in texts]}
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
    """Return, as JSON, the first failure; without one, the processes that differ, for each value.

    Args:
        messages: the messages of `_prepared`, by process.
    """
    votes = [json.loads(message) for message in messages]
    for index, vote in enumerate(votes):
        if "error" in vote:
            return json.dumps({**vote, "failed": index})
    columns = zip(*(vote["digests"] for vote in votes), strict=True)
    others = [[i for i, vote in enumerate(column) if vote != column[0]] for column in columns]
    return json.dumps({"others": others})


def _call_site(call: Callable[..., Any]) -> str:
    """Return a function's full name, which is equal in all processes."""
    call = call.func if isinstance(call, partial) else call
    name = getattr(call, "__qualname__", type(call).__qualname__)
    return f"{getattr(call, '__module__', '')}.{name}"


def as_json(error: BaseException | None) -> str:
    """Return an error as JSON for other processes; "{}" for None."""
    return json.dumps({} if error is None else {"error": type(error).__name__, "text": str(error)})


def from_json(message: Mapping[str, str], *, process: int = 0) -> StorageError:
    """Return another process's error; its class is StorageError if `storage` has none of its name.

    Args:
        message: the object that `as_json` encoded.
        process: the process that failed.
    """
    kind = getattr(errors, message["error"], StorageError)
    if not (isinstance(kind, type) and issubclass(kind, StorageError)):
        kind = StorageError
    return kind(f"process {process}: {message['text']}")
