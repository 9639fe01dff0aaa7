"""Files that appear once they are whole, or are gone on with, without a pause of the event loop."""

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from anyio import AsyncFile, to_thread, wrap_file

from cairn.service.client import whole_file as on_disk


@asynccontextmanager
async def whole_file(target: Path) -> AsyncIterator[AsyncFile[bytes]]:
    """A file to write to, which is called `target` once the block has ended well.

    It is made and given up here and not in a thread, so that a task that is cancelled leaves none:
    closing waits for what a thread is still writing.
    """
    with ExitStack() as parts:
        yield wrap_file(parts.enter_context(on_disk.whole_file(target)))
        await to_thread.run_sync(parts.close)


@asynccontextmanager
async def grown_file(target: Path) -> AsyncIterator[AsyncFile[bytes]]:
    """A file to write to at its end; what was written is on the disk once the block ends well.

    Raises:
        DownloadError: Another process has it so.
    """
    with ExitStack() as parts:
        yield wrap_file(parts.enter_context(on_disk.grown_file(target)))
        await to_thread.run_sync(parts.close)


async def crc32c_of(path: Path) -> str:
    """The CRC-32C of a file, eight hexadecimal digits."""
    return await to_thread.run_sync(on_disk.crc32c_of, path)
