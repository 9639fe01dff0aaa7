"""Sinks for data files: a local disk, by direct I/O, or an object store."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from cairn.storage.arrays.ocdbt import DATA_FOLDER
from cairn.storage.store.checksums import ContentSum
from cairn.storage.store.disk.direct_io import (
    DISK_ALIGNMENT,
    aligned_buffer,
    set_direct,
    write_from,
)
from cairn.storage.store.files import BLOCK_BYTES
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

__all__ = [
    "FILE_BYTES",
    "MAX_FILE_BYTES",
    "MAX_REMOTE_FILE_BYTES",
    "REMOTE_FILE_BYTES",
    "DataFileWriter",
    "FileContents",
    "UploadMemory",
    "open_data_file_writer",
]

FILE_BYTES: Final = 64 << 20
"""Maximum size in bytes of a data file on a disk."""

REMOTE_FILE_BYTES: Final = 4 << 20
"""Maximum size in bytes of an object; `_REMOTE_WRITERS` of them are in memory at a time."""

MAX_REMOTE_FILE_BYTES: Final = 16 << 20
"""Maximum size in bytes of an object of a large item, so that there are not too many objects."""

MAX_FILE_BYTES: Final = 400 << 20
"""Maximum size in bytes of a file of the largest items; a streamed upload in stores. See ADR 43."""

_FILES_OF_ITEM: Final = 4_000
"""Number of files per item at which the file size aims, within its limits."""

_OBJECTS_OF_ITEM: Final = 1_000
"""Number of objects per item above which objects grow, up to `MAX_REMOTE_FILE_BYTES`."""

_WRITERS: Final = 8
_REMOTE_WRITERS: Final = 8
_ASSEMBLERS: Final = max(2, min(4, os.cpu_count() or 1))
"""Threads that assemble objects. Few: malloc keeps the freed memory of each thread's arena."""

_MAX_FILLING: Final = max(2, os.cpu_count() or 2)
"""Disk buffers that are filled at once. More threads than processors would evict each other's
cache lines and contend for the GIL at each NumPy call. See ADR 45."""

_COPIES_OF_AN_OBJECT: Final = 2
"""Number of copies of an object in memory: ours, and the client's."""

_BLOCKS_OF_A_STREAM: Final = 4
"""Number of a streamed file's blocks in memory: ours, the client's, and those of the request."""

_FAST_UPLOAD_SECONDS: Final = 10.0
"""Upload time below which more uploads run at a time; far below the deadline of a silent store."""

FileContents = Generator[int, memoryview, None]
"""Generator of a file's content.

It yields a size, receives a buffer of that size, and fills it before it yields again or ends.
Checksums are computed from this buffer, which is then written, since the source arrays may change
meanwhile.
"""

_filling = threading.BoundedSemaphore(_MAX_FILLING)
"""Held while a thread fills a disk buffer, in any sink; not while the disk writes it."""


def _reset_filling() -> None:
    """Replace the semaphore in a forked child, where no thread would release it."""
    global _filling
    _filling = threading.BoundedSemaphore(_MAX_FILLING)


os.register_at_fork(after_in_child=_reset_filling)


class DataFileWriter(Protocol):
    """Sink for data files.

    Attributes:
        file_bytes: maximum size of a file, unless one value is larger.
        writers: number of files to write at a time.
    """

    file_bytes: int
    writers: int

    def write(
        self, name: str, pieces: FileContents, content: ContentSum, expected: int = 0
    ) -> "Future[str | None]":
        """Write a new file; the returned future is done once the file is durable.

        The future's result is the file's etag; None if the store has none.

        Args:
            name: name of the file in the folder.
            pieces: the file's content.
            content: content sum to which all bytes are added before this returns.
            expected: size in bytes before any compression; 0 if unknown.

        Raises:
            OSError: the disk is full, or failed.
            StoreUnavailableError: the store gives no answer.
        """

    def close(self) -> None:
        """Stop the threads."""


class UploadMemory:
    """Limiter of the bytes in memory for uploads, over all sinks that share it.

    Attributes:
        most: the limit in bytes; a single larger upload runs alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Count `nbytes` as used within the context; wait until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= self.most)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


def open_data_file_writer(
    folder: StoreURI, *, item_bytes: int = 0, uploads: UploadMemory | None = None
) -> DataFileWriter:
    """Open the sink for the database in `folder`.

    Args:
        folder: folder of the database.
        item_bytes: size of the item over all processes; larger items get larger files.
        uploads: memory for uploads; None: limited only by the number of concurrent files.
    """
    file_bytes = min(MAX_FILE_BYTES, item_bytes // _FILES_OF_ITEM)
    if folder.scheme == "file":
        return _DiskWriter(folder.local_path, max(FILE_BYTES, file_bytes))
    if file_bytes > MAX_REMOTE_FILE_BYTES:
        return _UploadWriter(folder, file_bytes, uploads)
    most = min(MAX_REMOTE_FILE_BYTES, max(REMOTE_FILE_BYTES, item_bytes // _OBJECTS_OF_ITEM))
    return _ObjectWriter(folder, most, uploads)


class _DiskWriter:
    """Sink for files on a local disk, by direct I/O where the file system supports it.

    Other threads sync each file while the next is written. See ADR 0013.
    """

    def __init__(self, folder: str, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.writers = _WRITERS
        self._folder = folder
        os.makedirs(os.path.join(folder, DATA_FOLDER), exist_ok=True)
        self._syncing = ThreadPoolExecutor(self.writers, thread_name_prefix="cairn-sync")

    def write(
        self, name: str, pieces: FileContents, content: ContentSum, expected: int = 0
    ) -> "Future[str | None]":
        path = os.path.join(self._folder, name)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            with aligned_buffer() as memory:
                _write_buffers(descriptor, pieces, memory, content)
        except OSError as exc:
            os.close(descriptor)
            raise OSError(exc.errno, exc.strerror, path) from exc
        except BaseException:
            os.close(descriptor)
            raise
        return self._syncing.submit(_sync_and_close, descriptor, path)

    def close(self) -> None:
        self._syncing.shutdown()


class _ObjectWriter:
    """Sink for objects of a store. Each is assembled in memory, so that a retry can resend it.

    One thread passes all objects to the client, which briefly holds two copies. If every writer
    thread did so, each would hold two, in malloc arenas that keep the memory. So memory holds the
    objects being uploaded, those being assembled, and two copies.
    """

    def __init__(
        self, folder: StoreURI, file_bytes: int, uploads: UploadMemory | None = None
    ) -> None:
        self.file_bytes = file_bytes
        self.writers = _ASSEMBLERS
        self._objects = ObjectStore(folder, patient=True)
        self._handing_over = ThreadPoolExecutor(1, thread_name_prefix="cairn-upload")
        self._sending = ThreadPoolExecutor(_REMOTE_WRITERS, thread_name_prefix="cairn-sent")
        self._window = _UploadWindow(_REMOTE_WRITERS, max(1, MAX_REMOTE_FILE_BYTES // file_bytes))
        self._uploads = uploads

    def write(
        self, name: str, pieces: FileContents, content: ContentSum, expected: int = 0
    ) -> "Future[str | None]":
        with contextlib.ExitStack() as stack:
            stack.enter_context(_reserved(self._uploads, _COPIES_OF_AN_OBJECT * expected))
            value = [_assemble(pieces, content, expected)]
            stack.enter_context(self._window.slot())
            answer = self._handing_over.submit(self._hand_over, name, value).result()
            return self._sending.submit(self._await_answer, answer, stack.pop_all())

    def _hand_over(self, name: str, value: list[bytearray]) -> Callable[[], bytes]:
        """Pass the value to the client, which copies it, and drop our last reference to it."""
        return self._objects.start_write(name, value.pop())

    def _await_answer(self, answer: Callable[[], bytes], stack: contextlib.ExitStack) -> str | None:
        """Wait for the store's answer, then release the upload's memory and slot."""
        with stack:
            return self._objects.etag_of(answer())

    def close(self) -> None:
        self._handing_over.shutdown()
        self._sending.shutdown()


class _UploadWriter:
    """Sink for large objects, each an upload of many requests with a block or two in memory.

    At the end it compares the store's checksum with its own.
    """

    def __init__(
        self, folder: StoreURI, file_bytes: int, uploads: UploadMemory | None = None
    ) -> None:
        self.file_bytes = file_bytes
        self.writers = _REMOTE_WRITERS
        self._files = open_files(folder)
        self._uploads = uploads

    def write(
        self, name: str, pieces: FileContents, content: ContentSum, expected: int = 0
    ) -> "Future[str | None]":
        needed = min(_BLOCKS_OF_A_STREAM * BLOCK_BYTES, _COPIES_OF_AN_OBJECT * expected)
        with _reserved(self._uploads, needed), self._files.open_write(name) as upload:
            for block in _blocks(pieces):
                content.update(block)
                upload.write(block)
        done: Future[str | None] = Future()
        done.set_result(upload.etag)
        return done

    def close(self) -> None:
        """Do nothing: there are no threads."""


def _next_size(pieces: FileContents, memory: memoryview | None = None) -> int | None:
    """Send `memory` to the generator; return the size of the next piece, or None after the last."""
    try:
        return next(pieces) if memory is None else pieces.send(memory)
    except StopIteration:
        return None


def _assemble(pieces: FileContents, content: ContentSum, expected: int) -> bytearray:
    """Return all bytes of a file; `expected` is its exact size unless it is compressed."""
    value, filled = bytearray(expected), 0
    size = _next_size(pieces)
    while size is not None:
        value = _grown(value, filled, size)
        start, filled = filled, filled + size
        size = _next_size(pieces, memoryview(value)[start:filled])
    if filled < len(value):
        value = value[:filled]
    content.update(value)
    return value


def _grown(memory: bytearray, filled: int, size: int) -> bytearray:
    """Return `memory` if it has room for `size` more bytes, else a larger copy.

    A bytearray with exported views can't grow.
    """
    if filled + size <= len(memory):
        return memory
    return memory[:filled] + bytearray(max(size, filled))


def _reserved(uploads: UploadMemory | None, nbytes: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if uploads is None else uploads.reserve(nbytes)


def _blocks(pieces: FileContents) -> Iterator[bytes]:
    """Yield the file's bytes in blocks of the size that an upload sends."""
    buffer, filled = bytearray(2 * BLOCK_BYTES), 0
    size = _next_size(pieces)
    while size is not None:
        buffer = _grown(buffer, filled, size)
        start, filled = filled, filled + size
        size = _next_size(pieces, memoryview(buffer)[start:filled])
        sent = 0
        for sent in range(BLOCK_BYTES, filled + 1, BLOCK_BYTES):
            yield bytes(memoryview(buffer)[sent - BLOCK_BYTES : sent])
        buffer[: filled - sent] = buffer[sent:filled]
        filled -= sent
    if filled:
        yield bytes(memoryview(buffer)[:filled])


class _UploadWindow:
    """Limiter of concurrent uploads: it allows more while uploads are fast."""

    def __init__(self, most: int, first: int) -> None:
        """Allow `first` uploads at a time at first, and never more than `most`."""
        self._most = most
        self._wide, self._sent = min(first, most), 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def slot(self) -> Iterator[None]:
        """Wait for a free slot, and hold it while an object is sent.

        Raises:
            BaseException: the error of another upload.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._error or self._sent < self._wide)
            if self._error is not None:
                raise self._error
            self._sent += 1
        began = time.monotonic()
        try:
            yield
        except BaseException as exc:
            self._error = exc
            raise
        finally:
            with self._changed:
                self._sent -= 1
                soon = time.monotonic() - began < _FAST_UPLOAD_SECONDS
                self._wide = min(2 * self._wide, self._most) if soon else max(1, self._wide // 2)
                self._changed.notify_all()


def _write_buffers(
    descriptor: int, pieces: FileContents, memory: memoryview, content: ContentSum
) -> None:
    """Write a new file buffer by buffer; the unaligned end goes through the page cache.

    The content sum is computed in the buffers: there the bytes are aligned as in the file, and
    still in the processor's cache.
    """
    at = 0
    set_direct(descriptor, on=True)
    fillings = _filled_buffers(pieces, memory, content)
    while True:
        with _filling:
            filled = next(fillings, 0)
        if not filled:
            return
        write_from(descriptor, memory[:filled], at)
        at += filled


def _filled_buffers(pieces: FileContents, memory: memoryview, content: ContentSum) -> Iterator[int]:
    """Fill `memory` with the next bytes, repeatedly; yield the number of bytes to write.

    Every number but the last is a multiple of the disk block. Bytes beyond it move to the front of
    the buffer.
    """
    filled = 0
    size = _next_size(pieces)
    while size is not None:
        if filled + size > len(memory) and filled >= DISK_ALIGNMENT:
            whole = filled - filled % DISK_ALIGNMENT
            content.update(memory[:whole])
            yield whole
            memory[: filled - whole] = memory[whole:filled]
            filled -= whole
        if filled + size <= len(memory):
            start, filled = filled, filled + size
            size = _next_size(pieces, memory[start:filled])
            continue
        alone = memoryview(bytearray(size))  # a chunk that is larger than the buffer
        size = _next_size(pieces, alone)
        while alone:
            count = min(len(alone), len(memory) - filled)
            memory[filled : filled + count] = alone[:count]
            alone, filled = alone[count:], filled + count
            if filled == len(memory):
                content.update(memory)
                yield filled
                filled = 0
    if filled:
        content.update(memory[:filled])
        yield filled


def _sync_and_close(descriptor: int, path: str) -> str | None:
    """Sync a file and close it; return None, as a disk has no etags."""
    try:
        os.fsync(descriptor)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, path) from exc
    finally:
        os.close(descriptor)
    return None
