"""`cairn init`: sets up a folder to start a control plane with."""

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer

from cairn.service.command.options import errors
from cairn.service.command.output.documents import JsonOption, print_document
from cairn.service.errors import SetUpError
from cairn.service.private_files import private_opener
from cairn.storage.errors import translate_error
from cairn.storage.store.uri import parse_uri

app: Final = typer.Typer()

ENV_FILE: Final = "cairn.env"
_HEAD: Final = """\
# Made by `cairn init`, for `cairn --env-file FILE`, a shell or systemd's EnvironmentFile=.
# A variable that is set already wins over its line here.
"""


@app.command()
def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[FOLDER]", help="Made if there is none; default: this one.")
    ] = Path(),
    root: Annotated[
        str | None,
        typer.Option(
            metavar="URI", help="Where runs lie, as gs://bucket/runs; default: in FOLDER."
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=1, max=65535, help="Of the control plane.")
    ] = 8321,
    json: JsonOption = False,
) -> None:
    """Set up a folder to start a control plane with.

    The folder gets a folder for the databases; a store for runs, unless --root names one; and
    cairn.env, a file that names both. The command tests whether the store keeps the promises that
    runs need, and removes its test files. It never replaces settings that are there already.
    """
    from cairn.storage.store_checks.probe import probe_now  # needs what a server needs

    home = folder.expanduser().absolute()
    uri = parse_uri(root or str(home / "store"))
    store = uri.local_path if uri.scheme == "file" else str(uri)
    chosen = {
        "CAIRN_ROOT": store,
        "CAIRN_DATA_DIR": str(home / "data"),
        "CAIRN_PORT": str(port),
        "CAIRN_URL": f"http://127.0.0.1:{port}",
    }
    text = _HEAD + "".join(f"{name}={shlex.quote(value)}\n" for name, value in chosen.items())
    path = home / ENV_FILE
    try:
        # First, so that a folder with other settings stays as it is.
        _refuse_others(path, text)
        home.mkdir(parents=True, exist_ok=True)
        if uri.scheme == "file":
            Path(store).mkdir(parents=True, exist_ok=True)
        probe_now(uri)
        (home / "data").mkdir(mode=0o700, exist_ok=True)
        # Last: a folder that has the file is ready to start with.
        _write(path, text)
    except OSError as exc:
        raise translate_error(exc, path=exc.filename or path) from exc
    if json:
        settings = {name.removeprefix("CAIRN_").lower(): value for name, value in chosen.items()}
        print_document({"env_file": str(path), **settings})
        return
    print(path)
    for name, setting in chosen.items():
        other = os.environ.get(name, setting)
        if other != setting:
            text = f"{name} is set to {other!r} here, and wins: `unset {name}` first."
            errors.print(text, soft_wrap=True)
    for line in _next_steps(path, store, port):
        errors.print(line, soft_wrap=True)


def _refuse_others(path: Path, text: str) -> None:
    """Raise `SetUpError` if the file has other settings, which somebody may need."""
    try:
        present = path.read_bytes()
    except FileNotFoundError:
        return
    if present != text.encode():
        raise SetUpError(
            f"{path}: expected nothing, or what would be written there, found other settings. "
            f"`cairn --env-file {shlex.quote(str(path))} serve` starts with them; change them "
            "there, or name another FOLDER."
        )


def _write(path: Path, text: str) -> None:
    """Write the file with mode 600, since its owner may add a database password to it."""
    try:
        with open(path, "xb", opener=private_opener) as file:
            file.write(text.encode())
    except FileExistsError:
        _refuse_others(path, text)


def _next_steps(path: Path, store: str, port: int) -> Iterator[str]:
    near = os.path.relpath(path)
    named = shlex.quote(str(path) if near.startswith("..") else near)
    yield f"Next, the control plane and its page at http://127.0.0.1:{port}:"
    yield f"  cairn --env-file {named} serve"
    yield "in other shells, so that `cairn runs` and all else asks it:"
    yield f"  export CAIRN_ENV_FILE={shlex.quote(str(path))}"
    yield "and in a training job, or with `Checkpointer` in a loop of your own:"
    yield f'  state.save_state("{store.rstrip("/")}/my-run")'
