"""`--output` of commands that tell a secret once: a new file, for its owner alone."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer

from cairn.service.private_files import private_opener
from cairn.storage.errors import translate

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
    """A new file for a secret, or None for none; gone if the block fails, which tells none then.

    Raises:
        typer.BadParameter: There is something already, even a link that leads nowhere.
        StorageError: The file can't be made.
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
        raise translate(exc, path=path) from exc
    try:
        with open(descriptor, "w") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise
