"""`cairn artifacts`: exports and gathered files of a checkpoint."""

from itertools import islice
from typing import Final
from urllib.parse import urlencode

import typer

from cairn.counts import count_text
from cairn.service.client.client import Client
from cairn.service.client.lookup import find_step
from cairn.service.client.protocol.paths import run_path, segment
from cairn.service.command.addresses import resolve_address
from cairn.service.command.options import CheckpointArgument, RootOption, UrlOption, console, errors
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.command.output.tables import print_table, readable
from cairn.service.export_options import has_permanent_address, options_text, typed_options
from cairn.service.schemas import Artifact, ArtifactList, OperationKind
from cairn.service.sizes import Size

app: Final = typer.Typer()

_EXAMINED: Final = 20  # steps; of each, the artifacts are listed in the store


@app.command("artifacts")
def artifacts_command(
    checkpoint: CheckpointArgument,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """List the exports and gathered files of a checkpoint.

    The newest comes first, with its id and with the address of its files. The address of an export
    stays the same: with an alias, it leads to the export of the alias's step. `cairn pull` with the
    same options keeps an export on another machine.
    """
    with Client(url) as client:
        address, place = resolve_address(client, checkpoint, root)
        run, step = find_step(client, address, place)
        listed = client.artifacts(run, step, root=place)
        name = address.alias or str(step)
        addresses = [_address(artifact, client.url, name) for artifact in listed]
        if json:
            document = ArtifactList(artifacts=listed).model_dump(mode="json")
            for artifact, lasting in zip(document["artifacts"], addresses, strict=True):
                artifact["address"] = lasting
            print_document(document)
            return
        if not listed:
            errors.print(_none(client, run, step, place), soft_wrap=True, markup=False)
    if console.is_terminal:  # lines, since an id alone is nearly as wide as a terminal
        for artifact, place in zip(listed, addresses, strict=True):
            text = (
                f"{artifact.kind.value} with {options_text(artifact.options)}: "
                f"{count_text(len(artifact.files), 'file')}, {Size(artifact.bytes)}, "
                f"{artifact.created:%Y-%m-%d %H:%M} UTC"
            )
            console.print(readable(text), soft_wrap=True)
            console.print(f"  {artifact.id}\n  {place}", soft_wrap=True)
        return
    rows = (
        (
            artifact.kind.value,
            options_text(artifact.options),
            len(artifact.files),
            Size(artifact.bytes),
            artifact.created,
            artifact.id,
            place,
        )
        for artifact, place in zip(listed, addresses, strict=True)
    )
    titles = ("kind", "options", "files", "size", "created (UTC)", "id", "address")
    print_table(console, titles, rows)


def _none(client: Client, run: str, step: int, root: str) -> str:
    """Return that a step has no artifacts, and which of the latest steps have some."""
    latest = islice(client.checkpoints(run, root=root, page_size=_EXAMINED), _EXAMINED)
    others = [checkpoint.step for checkpoint in latest if checkpoint.step != step]
    having = [str(other) for other in others if client.artifacts(run, other, root=root)]
    if having:
        return f"none of step {step}; steps with artifacts: {', '.join(having)}"
    return f"none of step {step}; `cairn convert {root}/{run}/steps/{step}` makes an export"


def _address(artifact: Artifact, url: str, checkpoint: str) -> str:
    """Return the address of the artifact's files; of an export, the one that stays."""
    if artifact.kind is not OperationKind.CONVERT or not has_permanent_address(artifact.options):
        return f"{url}/v1/artifacts/{segment(artifact.id)}/files/NAME"
    options = typed_options(artifact.options)
    query = f"?{urlencode(options)}" if options else ""
    path = f"{run_path(artifact.root, artifact.run)}/exports/{segment(checkpoint)}"
    return f"{url}{path}/files/NAME{query}"
