"""Progress of an operation in the shell, from its event stream."""

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.console import Console

from cairn.service.client.client import Client
from cairn.service.command.output.bars import bytes_bar
from cairn.service.command.output.documents import print_line
from cairn.service.command.output.listings import kind_name
from cairn.service.errors import OperationFailedError, WatchEndedError
from cairn.service.schemas import Operation, OperationState
from cairn.service.sizes import size_text

Show = Callable[[Iterable[Operation], Operation], Operation]
"""Function that shows an operation and each of its later states, and returns the last one."""


def watch_operation(client: Client, operation: Operation, show: Show) -> Operation:
    """Show progress until the operation has ended; return its last state.

    Raises:
        OperationFailedError: The operation failed or was cancelled.
        WatchEndedError: Ctrl-C, or the server went away; the operation goes on.
    """
    try:
        last = show(client.follow(operation.id), operation)
    except KeyboardInterrupt as exc:
        raise WatchEndedError(
            f"stopped watching; operation {operation.id} goes on. `cairn watch {operation.id}` "
            f"follows it again, `cairn cancel {operation.id}` ends it."
        ) from exc
    if last.state is not OperationState.SUCCEEDED:
        detail = "" if last.error is None else f": {last.error.detail}"
        raise OperationFailedError(f"operation {last.id} {last.state.value}{detail}")
    return last


def result_of(client: Client, operation: Operation) -> dict[str, Any]:
    """Return the result of a succeeded operation, with an artifact's folder as a path or URI."""
    result = dict(operation.result or {})
    if "artifact_id" in result:
        result["folder"] = client.artifact(result["artifact_id"]).uri.removeprefix("file://")
    return result


def result_lines(result: dict[str, Any]) -> Iterator[str]:
    """Format a result as `name: value` lines."""
    for name, value in result.items():
        yield f"{name}: {value if isinstance(value, str) else json.dumps(value)}"


def on_console(console: Console) -> Show:
    """Show a progress bar on a terminal, and lines elsewhere."""
    show = _with_bar if console.is_terminal else _with_lines
    return lambda states, operation: show(states, operation, console)


def silently(states: Iterable[Operation], operation: Operation) -> Operation:
    """Wait until the operation has ended, without output; return its last state."""
    # A deque of one drains the stream and keeps its last state.
    return next(iter(deque(states, maxlen=1)), operation)


def as_json(client: Client) -> Show:
    """Return a function that prints each state as a line of JSON, the last one with its result."""

    def show(states: Iterable[Operation], operation: Operation) -> Operation:
        last = operation
        for last in states:
            done = last.state is OperationState.SUCCEEDED
            fields = {"result": result_of(client, last)} if done else {}
            print_line(last.model_copy(update=fields))
        return last

    return show


def _with_bar(states: Iterable[Operation], operation: Operation, console: Console) -> Operation:
    last = operation
    with bytes_bar(console) as progress:
        task = progress.add_task(_title(operation), total=None)
        for last in states:
            progress.update(
                task,
                description=_title(last),
                completed=last.progress.done_bytes,
                total=last.progress.total_bytes,
            )
    return last


def _with_lines(states: Iterable[Operation], operation: Operation, console: Console) -> Operation:
    """Print a line whenever the message changes or another tenth of the bytes is done."""
    last = operation
    last_printed: tuple[str, int] | None = None
    for last in states:
        done, total = last.progress.done_bytes, last.progress.total_bytes
        now = (_title(last), 10 * done // total if total else 0)
        if now == last_printed:
            continue
        last_printed = now
        amount = f", {size_text(done)} of {size_text(total)}" if total else ""
        print(f"{now[0]}{amount}", file=console.file, flush=True)
    return last


def _title(operation: Operation) -> str:
    message = operation.progress.message
    if operation.state is not OperationState.RUNNING or not message:
        message = operation.state.value
    return f"{kind_name(operation)}: {message}"
