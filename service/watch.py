"""A progress bar for an operation, fed by its event stream."""

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from service.client import CairnClient
from service.errors import OperationFailedError
from service.schemas import Operation, OperationState


def follow_with_bar(client: CairnClient, operation: Operation, console: Console) -> Operation:
    """Show a live bar until the operation has ended; returns its last state."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
    )
    last = operation
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(operation.kind.value, total=None)
        for last in client.follow(operation.id):
            progress.update(
                task,
                description=f"{last.kind.value}: {last.progress.message or last.state.value}",
                completed=last.progress.done_bytes,
                total=last.progress.total_bytes,
            )
    return last


def watch_operation(
    client: CairnClient, operation: Operation, console: Console, *, watch: bool
) -> None:
    """Print where an operation can be followed, or follow it and print its result.

    Raises:
        OperationFailedError: It failed or was cancelled.
    """
    if not watch:
        console.print(f"operation {operation.id}: {client.url}/v1/operations/{operation.id}")
        return
    last = follow_with_bar(client, operation, console)
    if last.state is not OperationState.SUCCEEDED:
        detail = "" if last.error is None else f": {last.error.detail}"
        raise OperationFailedError(f"operation {last.id} ended {last.state.value}{detail}")
    for name, value in (last.result or {}).items():
        console.print(f"{name}: {value}", soft_wrap=True)
