"""The command of `cairn` that looks for damage."""

from typing import Annotated, Any, Final

import typer

from cairn.service.client.addresses import Address, find_step
from cairn.service.client.client import Client
from cairn.service.client.connection import DEFAULT_ROOT
from cairn.service.command.options import CheckpointArgument, RootOption, UrlOption, console, errors
from cairn.service.command.tables import print_table
from cairn.service.command.watch import watch_operation
from cairn.service.errors import OperationFailedError
from cairn.service.schemas import Operation, OperationState
from cairn.service.sizes import Size

app: Final = typer.Typer()

DAMAGED: Final = "urn:cairn:problem:damaged"


@app.command()
def verify(
    checkpoint: CheckpointArgument,
    all_steps: Annotated[
        bool, typer.Option("--all", help="Every listed step of the run RUN.")
    ] = False,
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
) -> None:
    """Read every byte of a checkpoint and find what is damaged.

    Exit status 1 if anything is not as it was saved; standard error names each file and leaf.
    """
    address = Address.parse(checkpoint)
    if all_steps and (address.alias is not None or address.step is not None):
        raise typer.BadParameter(f"--all takes a RUN alone, found {checkpoint!r}")
    with Client(url) as client:
        if all_steps:
            started = client.verify_run(address.run, root=root)
        else:
            started = client.verify(*find_step(client, address, root), root=root)
        found = _found(client, started)
    titles = ("step", "attempt", "found", "problems", "files", "size", "leaves", "seconds")
    print_table(console, titles, map(_row, found["steps"]))
    for report in found["steps"]:
        for problem in report["problems"]:
            errors.print(f"{address.run}/steps/{report['step']}: {problem}", soft_wrap=True)
    if not all(report["sound"] for report in found["steps"]):
        raise typer.Exit(1)


def _found(client: Client, started: Operation) -> dict[str, Any]:
    """What the operation found, good or bad.

    Raises:
        OperationFailedError: It could not tell.
    """
    try:
        last = watch_operation(client, started, errors)
    except OperationFailedError:
        last = client.operation(started.id)
        if last.state is not OperationState.FAILED or last.error is None:
            raise
        if last.error.type != DAMAGED:
            raise
        return dict(last.error.model_extra or {})
    return dict(last.result or {})


def _row(report: dict[str, Any]) -> tuple[Any, ...]:
    return (
        report["step"],
        report["attempt"],
        "sound" if report["sound"] else "damaged",
        report["problem_count"],
        report["files"],
        Size(report["bytes"]),
        report["leaves"],
        str(report["seconds"]),
    )
