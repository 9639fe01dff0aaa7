"""`cairn writer`: shows the writer of a run, and takes the run from it."""

from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.client.protocol.paths import DEFAULT_ROOT
from cairn.service.command.options import RootOption, RunArgument, UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table

app: Final = typer.Typer()


@app.command()
def writer(
    run: RunArgument,
    take_over: Annotated[
        int | None,
        typer.Option(
            metavar="ATTEMPT",
            min=0,
            help="End this attempt, so that another writer begins at once.",
        ),
    ] = None,
    reason: Annotated[str, typer.Option(help="For the audit trail.")] = "",
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show who writes a run, or take the run from its writer.

    Listed steps stay. A job that still runs under that writer can list no more steps. A job that
    restarts with its writer's id takes the run over by itself, and any job can once the lease has
    ended.
    """
    with Client(url) as client:
        if take_over is None:
            if reason:
                raise typer.BadParameter("--reason: expected --take-over ATTEMPT with it")
            found = client.writer(run, root=root)
            if json:
                print_document(found)
                return
            titles = ("writer", "attempt", "holds the run", "lease ends (UTC)")
            if found.writer is not None:
                holds = "yes" if found.holds else "no"
                row = (found.writer, found.attempt, holds, found.expires)
                print_table(console, titles, [row])
            return
        taken = client.take_over_run(run, attempt=take_over, reason=reason, root=root)
    if json:
        print_document(taken)
    else:
        print(f"attempt {taken.ended} of {taken.writer} ended; latest step {taken.latest_step}")
