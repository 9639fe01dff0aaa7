"""A file that appears once it is whole, and one that is gone on with."""

import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, Final

from cairn.service.errors import DownloadError

_BLOCK: Final = 8 << 20


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write to, which is called `target` once the block has ended well."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def grown_file(target: Path) -> Iterator[BinaryIO]:
    """A file to write to at its end; what was written is on the disk once the block ends well.

    Raises:
        DownloadError: Another process has it so.
    """
    refusal = DownloadError(
        f"{target}: expected no other process that writes it, found one. Give each a folder of its "
        "own."
    )
    with target.open("a+b") as file:
        take_alone(file, refusal)
        yield file
        file.flush()
        os.fsync(file.fileno())


def take_alone(file: IO[Any], refusal: Exception) -> None:
    """Lock an open file until it is closed.

    Args:
        file: It is not waited for.
        refusal: Is raised if another process has it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise refusal from exc


def crc32c_of(path: Path) -> str:
    """The CRC-32C of a file, eight hexadecimal digits."""
    import google_crc32c  # of an extra, which other requests do without

    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return str(checksum.digest().hex())
