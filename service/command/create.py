"""`cairn create`: creates a run before its job starts."""

from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.client.protocol.paths import DEFAULT_ROOT
from cairn.service.command.addresses import is_in_store
from cairn.service.command.annotate import labels_of
from cairn.service.command.options import NewRunRootOption, UrlOption
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.storage.runs.records.layout import check_run_name

app: Final = typer.Typer()


@app.command()
def create(
    run: Annotated[str, typer.Argument(metavar="RUN", help="RUN or ROOT/RUN; or URI or path.")],
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEXT", help="Set it; may be repeated.")
    ] = None,
    root: NewRunRootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Create a run before its job starts, and print its URI.

    A job that saves there later writes into this run. For a store URI (gs://bucket/runs/my-run), or
    a path with ./ or / in front, the command creates the run in the store itself, without a control
    plane and its audit trail.
    """
    labels = labels_of(label)
    if is_in_store(run):
        from cairn.storage.runs.run import create_run

        created = create_run(run, labels=labels)
        info = created.info()
        summary = {"name": info.name, "uri": str(created.uri), "created": info.created}
        labels = dict(info.labels)
    else:
        named, slash, name = run.rpartition("/")
        check_run_name(name)
        if slash and root not in (None, named):
            raise typer.BadParameter(f"{run!r} is in root {named!r}: leave out --root {root}")
        with Client(url) as client:
            made = client.create_run(name, labels=labels, root=named or root or DEFAULT_ROOT)
        body = made.model_dump(mode="json")
        summary = {name: body[name] for name in ("name", "uri", "created")}
        labels = body["labels"]
    if json:
        print_document({**summary, "labels": labels})
    else:
        print(summary["uri"])
