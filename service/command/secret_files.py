"""`--output` of commands that show a secret once: a new file that only its owner can read."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

from cairn.service.private_files import private_opener
from cairn.storage.errors import translate_error

SecretFileOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Write it to a new file that only you may read (mode 600); default: print it.",
    ),
]


@contextmanager
def secret_file(path: Path | None) -> Iterator[TextIO | None]:
    """Open a new file for a secret, and remove it if the block fails; without a path, yield None.

    Raises:
        typer.BadParameter: The path exists already, even as a dangling link.
        StorageError: The file can't be created.
    """
    if path is None:
        yield None
        return
    try:
        descriptor = private_opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError as exc:
        raise typer.BadParameter(
            f"{path}: expected no file, found one. Name another, or remove it first.",
            param_hint="'--output'",
        ) from exc
    except OSError as exc:
        raise translate_error(exc, path=path) from exc
    try:
        with open(descriptor, "w") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise
