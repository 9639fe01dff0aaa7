"""`cairn create`: creates a run before its job starts."""

from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.client.protocol.paths import DEFAULT_ROOT
from cairn.service.command.annotate import labels_of
from cairn.service.command.options import RootOption, UrlOption, is_in_store
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.storage.runs.records.layout import check_run_name

app: Final = typer.Typer()


@app.command()
def create(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Name of the new run; or its URI or path.")
    ],
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=TEXT", help="Set it; may be repeated.")
    ] = None,
    root: RootOption = DEFAULT_ROOT,
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
        check_run_name(run)
        with Client(url) as client:
            body = client.create_run(run, labels=labels, root=root).model_dump(mode="json")
        summary = {name: body[name] for name in ("name", "uri", "created")}
        labels = body["labels"]
    if json:
        print_document({**summary, "labels": labels})
    else:
        print(summary["uri"])
