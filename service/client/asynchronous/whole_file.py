"""Atomic and resumable files whose I/O does not block the event loop."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from anyio import AsyncFile, to_thread, wrap_file

from cairn.service.client import whole_file as on_disk


@asynccontextmanager
async def whole_file(target: Path) -> AsyncIterator[AsyncFile[bytes]]:
    """Open a temporary file that replaces `target` when the block ends without an error.

    The event loop's own thread creates and discards the file, so a cancelled task leaves none:
    closing waits for a thread that is still writing.
    """
    with ExitStack() as parts:
        yield wrap_file(parts.enter_context(on_disk.whole_file(target)))
        await to_thread.run_sync(parts.close)


@asynccontextmanager
async def grown_file(target: Path) -> AsyncIterator[AsyncFile[bytes]]:
    """Open a file to append to, under a lock; fsync it when the block ends without an error.

    Raises:
        DownloadError: Another process holds the lock.
    """
    with ExitStack() as parts:
        yield wrap_file(parts.enter_context(on_disk.grown_file(target)))
        await to_thread.run_sync(parts.close)


async def crc32c_of(path: Path) -> str:
    """Return the CRC-32C of a file as eight hexadecimal digits."""
    return await to_thread.run_sync(on_disk.crc32c_of, path)
