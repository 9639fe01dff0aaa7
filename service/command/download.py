"""`cairn download`: copies the files of a checkpoint to this machine."""

from pathlib import Path
from typing import Annotated, Final

import typer

from cairn.service.client.client import Client
from cairn.service.command.addresses import resolve_checkpoint
from cairn.service.command.options import CheckpointArgument, RootOption, UrlOption, errors
from cairn.service.command.output.bars import bytes_bar
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.errors import DownloadError
from cairn.service.schemas import Response

app: Final = typer.Typer()


class DownloadedStep(Response):
    """Document that `cairn download --json` prints."""

    run: str
    step: int
    attempt: int
    folder: str
    files: int
    bytes: int


@app.command("download")
def download_command(
    checkpoint: CheckpointArgument,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A new one, or one to go on with.")
    ],
    prefix: Annotated[
        str, typer.Option(metavar="TEXT", help="Files whose name begins so, as model/.")
    ] = "",
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Copy the files of a checkpoint; plain Orbax reads the copy.

    Each file is checked against its size and CRC-32C, and appears once it is complete. After an
    interruption, the same command continues the download. For files that PyTorch loads, see
    `cairn pull`.
    """
    with Client(url) as client:
        source = resolve_checkpoint(client, checkpoint, root)
        run, step, attempt = source.run, source.step, source.attempt
        with bytes_bar(errors) as bar:
            task = bar.add_task(f"{run}/steps/{step}", total=None)
            files = client.download_step(
                run,
                step,
                folder,
                prefix=prefix,
                root=source.root,
                tell=lambda done, total: bar.update(task, completed=done, total=total),
            )
        attempt_now = client.checkpoint(run, step, root=source.root, refresh=True).attempt
    if attempt_now != attempt:
        raise DownloadError(
            f"{run}, step {step}: expected that of attempt {attempt}, found that of attempt "
            f"{attempt_now}: it was superseded meanwhile, and saved anew. Download it again, into "
            "another folder."
        )
    if json:
        print_document(
            DownloadedStep(
                run=run,
                step=step,
                attempt=attempt,
                folder=str(folder),
                files=len(files),
                bytes=sum(file.bytes for file in files),
            )
        )
    else:
        print(folder)
