"""Resumable download of a file, compared with its checksum at the end."""

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Final

from cairn.service.client.asynchronous.whole_file import crc32c_of, grown_file
from cairn.service.errors import DownloadError

_BLOCK: Final = 8 << 20


async def is_as_recorded(path: Path, size: int, crc32c: str | None) -> bool:
    """Return True if a file exists with its recorded size and checksum.

    A file without a recorded checksum is never accepted.

    Args:
        path: Path of the file, which is read.
        size: Recorded size in bytes.
        crc32c: Recorded CRC-32C, eight hexadecimal digits, or None.
    """
    if crc32c is None or not path.is_file() or path.stat().st_size != size:
        return False
    return await crc32c_of(path) == crc32c


async def fetch_checked(
    read: Callable[[int], AsyncGenerator[bytes, None]],
    target: Path,
    *,
    size: int,
    crc32c: str | None,
    name: str,
    tell: Callable[[int], None] = lambda done: None,
) -> None:
    """Download the missing end of a file, and compare its checksum.

    If the checksum is wrong, the whole file is downloaded once more.

    Args:
        read: Function that yields the bytes from an offset on.
        target: The file, complete or partial; it stays if the download breaks.
        size: Recorded size in bytes.
        crc32c: Recorded CRC-32C, eight hexadecimal digits, or None.
        name: Name of the file, for the error message.
        tell: Progress callback with the bytes so far.

    Raises:
        DownloadError: The file is wrong a second time, or another process writes it.
    """
    import google_crc32c  # here: most requests need none

    for again in (True, False):
        checksum = google_crc32c.Checksum()
        async with grown_file(target) as sink:
            if await sink.tell() > size:
                await sink.truncate(0)
            await sink.seek(0)
            while block := await sink.read(_BLOCK):
                checksum.update(block)
            done = await sink.tell()
            async for block in read(done):
                await sink.write(block)
                checksum.update(block)
                done += len(block)
                tell(done)
        digest = checksum.digest().hex()
        if done == size and digest == (crc32c or digest):
            return
        target.unlink()
        if not again:
            raise DownloadError(
                f"{name}: expected {size} bytes, crc32c {crc32c}, found {done} bytes, {digest}. "
                "`cairn verify` says whether the store is damaged."
            )
