"""`cairn writer` and `cairn take-over`: the writer of a run, and taking the run from it."""

from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command.addresses import resolve_run
from cairn.service.command.options import RootOption, RunArgument, UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table

app: Final = typer.Typer()


@app.command()
def writer(
    run: RunArgument,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show the current or last writer of a run."""
    with Client(url) as client:
        place = resolve_run(client, run, root)
        status = client.writer(place.run, root=place.root)
    if json:
        print_document(status)
        return
    titles = ("writer", "attempt", "holds the run", "lease ends (UTC)")
    if status.writer is not None:
        holds = "yes" if status.holds else "no"
        print_table(console, titles, [(status.writer, status.attempt, holds, status.expires)])


@app.command("take-over")
def take_over(
    run: RunArgument,
    attempt: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="The attempt to end, as `cairn writer` shows it."),
    ],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="For the audit trail.")] = "",
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """End the attempt of a run's writer, so that another can begin.

    Listed steps stay. A job that still runs under that writer can list no more steps. A job that
    restarts with its writer's id takes the run over by itself, and any job can once the lease has
    ended.
    """
    with Client(url) as client:
        place = resolve_run(client, run, root)
        taken = client.take_over_run(place.run, attempt=attempt, reason=reason, root=place.root)
    if json:
        print_document(taken)
    else:
        print(f"attempt {taken.ended} of {taken.writer} ended; latest step {taken.latest_step}")
