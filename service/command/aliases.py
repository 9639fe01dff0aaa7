"""`cairn aliases`: aliases of a run, and the history of one."""

from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command import completion
from cairn.service.command.addresses import resolve_run
from cairn.service.command.options import RootOption, RunArgument, UrlOption, console, errors
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.schemas import AliasList

_TITLES: Final = ("step", "attempt", "sequence", "by", "at (UTC)", "reason")

app: Final = typer.Typer()


@app.command()
def aliases(
    run: RunArgument,
    alias: Annotated[
        str | None,
        typer.Argument(
            metavar="ALIAS", help="Its history, newest first.", autocompletion=completion.aliases
        ),
    ] = None,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show where a run's aliases point, or who moved one, and why.

    The history has the last hundred moves, even for a deleted alias.
    """
    with Client(url) as client:
        place = resolve_run(client, run, root)
        if alias is None:
            current = client.aliases(place.run, root=place.root, refresh=True)
            if json:
                print_document(AliasList(aliases=current))
                return
            rows = (
                (
                    entry.alias,
                    entry.step,
                    entry.attempt,
                    entry.sequence,
                    entry.by,
                    entry.at,
                    entry.reason,
                )
                for entry in current
            )
            print_table(console, ("alias", *_TITLES), rows)
            for checkpoint in client.checkpoints(
                place.run, root=place.root, state="all", filter="aliases:*"
            ):
                for name in checkpoint.aliases if checkpoint.damaged is not None else ():
                    text = f"{name}: {place.run}/steps/{checkpoint.step} is damaged"
                    errors.print(text, soft_wrap=True, markup=False)
            return
        history = client.alias_history(place.run, alias, root=place.root)
        if json:
            print_document(history)
        else:
            moves = (
                (
                    "(deleted)" if move.deleted else move.step,
                    move.attempt,
                    move.sequence,
                    move.by,
                    move.at,
                    move.reason,
                )
                for move in history.events
            )
            print_table(console, _TITLES, moves)
