"""`cairn artifacts`: exports and gathered files of a checkpoint."""

from typing import Any, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command.addresses import resolve_step
from cairn.service.command.options import CheckpointArgument, RootOption, UrlOption, console
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table
from cairn.service.schemas import Artifact, ArtifactList
from cairn.service.sizes import Size

app: Final = typer.Typer()


@app.command("artifacts")
def artifacts_command(
    checkpoint: CheckpointArgument,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the exports and gathered files of a checkpoint.

    The newest comes first. `cairn pull` with the same options keeps an export on another machine.
    """
    with Client(url) as client:
        place = resolve_step(client, checkpoint, root)
        listed = client.artifacts(place.run, place.step, root=place.root)
    if json:
        print_document(ArtifactList(artifacts=listed))
        return
    rows = (
        (
            artifact.kind.value,
            _options(artifact),
            len(artifact.files),
            Size(artifact.bytes),
            artifact.created,
            artifact.uri,
        )
        for artifact in listed
    )
    print_table(console, ("kind", "options", "files", "size", "created (UTC)", "folder"), rows)


def _options(artifact: Artifact) -> str:
    options: dict[str, Any] = artifact.options
    return " ".join(f"{name}={value}" for name, value in options.items() if value is not None)
