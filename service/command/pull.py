"""`cairn pull`: keeps an export of a checkpoint on a host that serves the model."""

import os
import shlex
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from cairn.service.client.addresses import Address
from cairn.service.client.client import Client
from cairn.service.client.lookup import find_checkpoint
from cairn.service.client.pull import CURRENT, Pulled, pull
from cairn.service.command.addresses import check_address, resolve_address
from cairn.service.command.failures import line_of
from cairn.service.command.options import (
    TIME,
    AllowNonfiniteOption,
    CheckLogitsOption,
    CheckpointArgument,
    DespiteDamageOption,
    DtypeOption,
    FormatOption,
    LoraOption,
    ReferenceLogitsOption,
    RootOption,
    ShardSizeOption,
    TrainerConfigOption,
    UrlOption,
    errors,
)
from cairn.service.command.output.documents import JsonOption, print_line
from cairn.service.command.trainer_config import read_trainer_config
from cairn.service.errors import (
    ClientError,
    OperationFailedError,
    PullError,
    ServerUnreachableError,
)
from cairn.service.schemas import Checkpoint, Response
from cairn.storage.store.uri import parse_uri

app: Final = typer.Typer()

EVERY_SECONDS: Final = 10.0

EXECUTED: Final = ".executed"
"""File in the folder with the version for which the command of `--exec` last succeeded."""

STDERR: Final = 2
_MAX_COMMAND: Final = 60  # characters of the command in an error


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
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Target folder; `current` links to the newest version."
        ),
    ],
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep running, and fetch each new step, until Ctrl-C.")
    ] = False,
    every: Annotated[
        float | None, typer.Option(help="Poll interval; default: 10s.", **TIME)
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Number of old versions to keep; default: all."),
    ] = None,
    despite_damage: DespiteDamageOption = None,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="COMMAND",
            help="Shell command to run after `current` has changed, such as a restart of the "
            "model server; it runs again at the next pull if it fails.",
        ),
    ] = None,
    format: FormatOption = "huggingface",
    dtype: DtypeOption = None,
    max_shard_size: ShardSizeOption = "5GB",
    lora: LoraOption = None,
    allow_nonfinite: AllowNonfiniteOption = False,
    check_logits: CheckLogitsOption = False,
    reference_logits: ReferenceLogitsOption = None,
    config: TrainerConfigOption = None,
    root: RootOption = None,
    url: UrlOption = None,
    json: JsonOption = False,
) -> None:
    """Download an export and keep it up to date.

    FOLDER/current is a link to complete, verified files; it changes atomically. An interrupted
    download continues where it stopped. Old versions stay, unless --keep limits them.
    FOLDER/current/pulled.json says which run, step, attempt and options it serves.
    An export that exists takes a key with the scope `read`; to make one takes `operate`.
    The command of --exec gets PULLED_RUN, PULLED_STEP and PULLED_FOLDER in its
    environment; its output goes to standard error.
    """
    check_address(checkpoint)
    options: dict[str, Any] = {"format": format, "dtype": dtype, "max_shard_size": max_shard_size}
    # Left out if they say nothing: a server of before does not know them.
    options |= {"lora": lora} if lora else {}
    options |= {"allow_nonfinite": True} if allow_nonfinite else {}
    options |= {"check_logits": True} if check_logits else {}
    if reference_logits is not None:
        options["reference_logits"] = str(parse_uri(reference_logits))
    if config is not None:
        options["config"] = read_trainer_config(config)
    pulled_last: Checkpoint | None = None
    is_watching = False
    place: tuple[Address, str] | None = None
    failure = ""
    pause = EVERY_SECONDS if every is None else every
    with Client(url) as client:
        while True:
            try:
                if place is None:
                    place = resolve_address(client, checkpoint, root)
                current = find_checkpoint(client, *place)
                if pulled_last is None or (
                    (current.step, current.attempt) != (pulled_last.step, pulled_last.attempt)
                ):
                    pulled_last = None  # should this try fail, the next one makes good for it
                    pulled = pull(
                        client,
                        current.run,
                        current.step,
                        folder,
                        root=current.root,
                        options=options,
                        attempt=current.attempt,
                        keep=keep,
                        despite_damage=despite_damage,
                    )
                    if json:
                        _print_json(pulled)
                    elif not watch:
                        print(_place(pulled), flush=True)
                    elif pulled.changed:
                        print(_dated(checkpoint, _place(pulled)), flush=True)
                    if command is not None:
                        _execute(command, folder, pulled)
                    if watch and not is_watching:
                        is_watching = True
                        _log(checkpoint, "watching for new steps; press Ctrl-C to stop.")
                elif current.damaged is not None and pulled_last.damaged is None:
                    text = (
                        f"{current.run}/steps/{current.step} was found damaged after it was "
                        f"pulled. {folder} still has its complete, earlier export."
                    )
                    _log(checkpoint, text)
                pulled_last = current
                if failure:
                    is_back = failure == client.url
                    back = "the control plane answers again" if is_back else "the pull succeeded"
                    _log(checkpoint, f"{back}.")
                failure = ""
            except (ClientError, OperationFailedError, PullError, OSError) as exc:
                if not watch:
                    raise
                # One line for each failure, not for each try; a server that is away is one.
                is_away = isinstance(exc, ServerUnreachableError)
                now = client.url if is_away else line_of(exc)
                if now != failure:
                    _log(checkpoint, f"{line_of(exc)} Trying again every {pause:g} s.")
                failure = now
            if not watch:
                return
            time.sleep(pause)


def _dated(checkpoint: str, text: str) -> str:
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC {checkpoint}: {text}"


def _log(checkpoint: str, text: str) -> None:
    errors.print(_dated(checkpoint, text), soft_wrap=True, markup=False)


def _execute(command: str, folder: Path, pulled: Pulled) -> None:
    """Run the command of `--exec`, unless it has succeeded for this version.

    A pull that is killed after the switch leaves it to the next one.

    Raises:
        PullError: The command fails.
    """
    executed, version = folder / EXECUTED, pulled.folder.name
    if executed.is_file() and executed.read_text() == version:
        return
    described = {
        "PULLED_RUN": pulled.run,
        "PULLED_STEP": str(pulled.step),
        "PULLED_FOLDER": str(pulled.folder.absolute()),
    }
    executed.unlink(missing_ok=True)  # should this fail, the command runs again for any version
    status = subprocess.run(
        command, shell=True, stdout=STDERR, env={**os.environ, **described}
    ).returncode
    if status != 0:
        short = command if len(command) <= _MAX_COMMAND else f"{command[:_MAX_COMMAND]}…"
        raise PullError(
            f"exit status {status} of the command of --exec, {shlex.quote(short)}, after "
            f"{folder / CURRENT} changed to {version}. The next pull runs it again."
        )
    executed.write_text(version)


def _place(pulled: Pulled) -> str:
    return f"{pulled.run}/steps/{pulled.step}: {pulled.folder}"


def _print_json(pulled: Pulled) -> None:
    print_line(
        PulledStep(
            run=pulled.run,
            step=pulled.step,
            artifact=pulled.artifact,
            folder=str(pulled.folder),
            changed=pulled.changed,
        )
    )
