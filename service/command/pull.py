"""`cairn pull`: keeps an export of a checkpoint on a host that serves the model."""

import time
from pathlib import Path
from typing import Annotated, Final

import typer

from cairn.service.client.addresses import Address
from cairn.service.client.client import Client
from cairn.service.client.lookup import find_checkpoint
from cairn.service.client.protocol.paths import DEFAULT_ROOT
from cairn.service.client.pull import Pulled, pull
from cairn.service.command.options import (
    SIZE,
    TIME,
    CheckpointArgument,
    DespiteDamageOption,
    DtypeOption,
    RootOption,
    UrlOption,
    errors,
)
from cairn.service.command.output.documents import JsonOption, print_line
from cairn.service.errors import ClientError, OperationFailedError, PullError
from cairn.service.schemas import Checkpoint, Response

app: Final = typer.Typer()

EVERY_SECONDS: Final = 10.0


class PulledStep(Response):
    """Line that `cairn pull --json` prints for each new export."""

    run: str
    step: int
    artifact: str
    folder: str
    changed: bool


@app.command("pull")
def pull_command(
    checkpoint: CheckpointArgument,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Which has `current` in it.")],
    watch: Annotated[
        bool, typer.Option("--watch", help="Stay, and fetch each next one, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float | None, typer.Option(help="How often that is looked at; default: 10s.", **TIME)
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Replaced versions that stay; default: all."),
    ] = None,
    despite_damage: DespiteDamageOption = None,
    dtype: DtypeOption = None,
    max_shard_size: Annotated[
        str, typer.Option(help="Of one file, such as 500MB, 5GB or 5GiB.", **SIZE)
    ] = "5GB",
    root: RootOption = DEFAULT_ROOT,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Keep an export of a checkpoint on a host that serves it.

    FOLDER/current is a link to complete, verified files; it changes atomically. An interrupted
    download continues where it stopped. Replaced versions stay, unless --keep limits them.
    """
    address = Address.parse(checkpoint)
    options = {"dtype": dtype, "max_shard_size": max_shard_size}
    pulled_last: Checkpoint | None = None
    with Client(url) as client:
        while True:
            try:
                current = find_checkpoint(client, address, root)
                if pulled_last is None or (
                    (current.step, current.attempt) != (pulled_last.step, pulled_last.attempt)
                ):
                    pulled = pull(
                        client,
                        current.run,
                        current.step,
                        folder,
                        root=root,
                        options=options,
                        attempt=current.attempt,
                        keep=keep,
                        despite_damage=despite_damage,
                    )
                    _say(pulled, json, said=not watch or pulled.changed)
                    if watch and pulled_last is None:
                        stays = f"Watching {checkpoint} for another step; Ctrl-C ends it."
                        errors.print(stays, soft_wrap=True, markup=False)
                elif current.damaged is not None and pulled_last.damaged is None:
                    text = (
                        f"{current.run}/steps/{current.step} was found damaged since it was "
                        f"pulled. {folder} serves what was exported of it before, and whole."
                    )
                    errors.print(text, soft_wrap=True, markup=False)
                pulled_last = current
            except (ClientError, OperationFailedError, PullError, OSError) as exc:
                if not watch:
                    raise
                errors.print(f"{checkpoint}: {exc}", soft_wrap=True, markup=False)
            if not watch:
                return
            time.sleep(EVERY_SECONDS if every is None else every)


def _say(pulled: Pulled, json: bool, *, said: bool) -> None:
    if json:
        print_line(
            PulledStep(
                run=pulled.run,
                step=pulled.step,
                artifact=pulled.artifact,
                folder=str(pulled.folder),
                changed=pulled.changed,
            )
        )
    elif said:
        print(f"{pulled.run}/steps/{pulled.step}: {pulled.folder}", flush=True)
