# Made of asynchronous/checked_file.py by `python scripts/sync_client.py`: change that one.
"""A file that is fetched bit by bit, however often that breaks off, and compared in the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from cairn.service.client.whole_file import crc32c_of, grown_file
from cairn.service.errors import DownloadError

_BLOCK: Final = 8 << 20


def is_as_recorded(path: Path, size: int, crc32c: str | None) -> bool:
    """Whether a file is there, and what it should be; one without a checksum never is.

    Args:
        path: Of the file, which is read.
        size: Its bytes.
        crc32c: Eight hexadecimal digits; None: nobody has noted it.
    """
    if crc32c is None or not path.is_file() or path.stat().st_size != size:
        return False
    return crc32c_of(path) == crc32c


def fetch_checked(
    read: Callable[[int], Iterator[bytes]],
    target: Path,
    *,
    size: int,
    crc32c: str | None,
    name: str,
    tell: Callable[[int], None] = lambda done: None,
) -> None:
    """Go on with a file, and compare it; one that is wrong is fetched anew, once.

    Args:
        read: What comes from an offset on.
        target: The file, or what is there of it; stays if this breaks off.
        size: Its bytes.
        crc32c: Eight hexadecimal digits; None: nobody has noted it.
        name: Of the file, for the message.
        tell: Is told how many bytes are there.

    Raises:
        DownloadError: It is wrong again, or another process writes it.
    """
    import google_crc32c  # of an extra, which other requests do without

    for again in (True, False):
        checksum = google_crc32c.Checksum()
        with grown_file(target) as sink:
            if sink.tell() > size:
                sink.truncate(0)
            sink.seek(0)
            while block := sink.read(_BLOCK):
                checksum.update(block)
            done = sink.tell()
            for block in read(done):
                sink.write(block)
                checksum.update(block)
                done += len(block)
                tell(done)
        found = checksum.digest().hex()
        if done == size and found == (crc32c or found):
            return
        target.unlink()
        if not again:
            raise DownloadError(
                f"{name}: expected {size} bytes, crc32c {crc32c}, found {done} bytes, {found}. "
                "`cairn verify` says whether the store is damaged."
            )
