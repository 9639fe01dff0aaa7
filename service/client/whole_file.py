"""Files that appear only when they are complete, and files that are resumed."""

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
    """Open a temporary file that replaces `target` when the block ends without an error."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def grown_file(target: Path) -> Iterator[BinaryIO]:
    """Open a file to append to, under a lock; fsync it when the block ends without an error.

    Raises:
        DownloadError: Another process holds the lock.
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
        file: An open file; the call does not wait for the lock.
        refusal: Error to raise if another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        raise refusal from exc


def crc32c_of(path: Path) -> str:
    """Return the CRC-32C of a file as eight hexadecimal digits."""
    import google_crc32c  # here: most requests need none

    checksum = google_crc32c.Checksum()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum.update(block)
    return str(checksum.digest().hex())
