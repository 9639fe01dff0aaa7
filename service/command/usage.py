"""`cairn usage`: bytes of a run and its steps in the store."""

from typing import Final

import typer

from cairn.counts import count_text
from cairn.service.client.client import Client
from cairn.service.command.addresses import check_run, is_in_store, resolve_run
from cairn.service.command.options import RootOption, RunArgument, UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.sizes import Size, size_text

app: Final = typer.Typer()


@app.command()
def usage(
    run: RunArgument,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Show the bytes of a run and its steps in the store.

    If steps share a file, its bytes count for the first of them only. The command reads a store
    URI, or a path with ./ or / in front, in the store itself.
    """
    check_run(run)
    if is_in_store(run):
        from cairn.service.actions.usage import usage_of
        from cairn.storage.runs.run import Run

        found_run = Run.open(run)
        measured = usage_of(found_run, str(found_run.uri.parent))
    else:
        with Client(url) as client:
            place = resolve_run(client, run, root)
            measured = client.usage(place.run, root=place.root)
    if json:
        print_document(measured)
        return
    titles = ("step", "attempt", "state", "created (UTC)", "size", "added", "own")
    rows = (
        (s.step, s.attempt, s.state, s.created, Size(s.bytes), Size(s.added), Size(s.own))
        for s in measured.steps
    )
    print_table(console, titles, rows)
    uses = ", ".join(f"{use} {size_text(size)}" for use, size in measured.uses.items() if size)
    print(
        f"{measured.bytes} bytes in {count_text(measured.files, 'file')}: {uses or 'nothing'}; "
        f"`cairn gc` would free {size_text(measured.garbage)}"
    )
