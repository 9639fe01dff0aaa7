"""Where value files go: a local disk, past its page cache, or an object store. Imports no JAX."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from cairn.storage.arrays.ocdbt import VALUE_FOLDER
from cairn.storage.store import (
    BLOCK_BYTES,
    DISK_ALIGNMENT,
    ContentSum,
    ObjectStore,
    StoreURI,
    aligned_buffer,
    open_files,
    set_direct,
    write_from,
)

__all__ = [
    "FILE_BYTES",
    "MOST_FILE_BYTES",
    "MOST_REMOTE_BYTES",
    "REMOTE_FILE_BYTES",
    "Pieces",
    "UploadMemory",
    "ValueSink",
    "open_sink",
]

FILE_BYTES: Final = 64 << 20
"""A value file on a disk is closed once it would grow beyond this."""

REMOTE_FILE_BYTES: Final = 4 << 20
"""The same for objects, of which `_REMOTE_WRITERS` are in memory at a time."""

MOST_REMOTE_BYTES: Final = 16 << 20
"""The same for objects of large items, of which there would be too many else."""

MOST_FILE_BYTES: Final = 400 << 20
"""The same for files of the largest items, which are written as a stream. See ADR 43."""

_FILES_OF_ITEM: Final = 4_000
"""About so many files hold an item, whatever its size, as long as files can grow."""

_OBJECTS_OF_ITEM: Final = 1_000
"""From so many on objects grow, up to `MOST_REMOTE_BYTES`."""

_WRITERS: Final = 8
_REMOTE_WRITERS: Final = 8
_REMOTE_MAKERS: Final = max(2, min(4, os.cpu_count() or 1))
"""Threads that put objects together: each has a part of the heap that keeps what it once had."""

_FILLED_AT_ONCE: Final = max(2, os.cpu_count() or 2)
"""Buffers for a disk that are filled at a time. With more threads than processors they would take
each other's place in the cache, and wait for each other at each of NumPy's calls. See ADR 45."""

_COPIES_OF_AN_OBJECT: Final = 2
"""In memory on its way: one that is put together, and the client's."""

_BLOCKS_OF_A_STREAM: Final = 4
"""In memory of a file that is sent as a stream: ours, the client's, and that of the request."""

_SOON_SECONDS: Final = 10.0
"""If an object takes less, twice as many at a time take far less than a store may be silent."""

Pieces = Generator[int, memoryview, None]
"""The contents of a file. It asks for memory for so many bytes, which lie in one piece there, and
has filled it when it asks again, or ends. So what is written can be summed where it lies: the
arrays that it was copied from may be changed meanwhile by whoever shares their memory."""

_filling = threading.BoundedSemaphore(_FILLED_AT_ONCE)
"""Held by who fills a buffer for a disk, in all sinks; not while the disk writes it."""


def _forget_fillers() -> None:
    """A child that was forked has none of the threads that hold it."""
    global _filling
    _filling = threading.BoundedSemaphore(_FILLED_AT_ONCE)


os.register_at_fork(after_in_child=_forget_fillers)


class ValueSink(Protocol):
    """Where value files go.

    Attributes:
        file_bytes: most bytes of a file, unless one value has more.
        writers: how many files to write at a time.
    """

    file_bytes: int
    writers: int

    def write(
        self, name: str, pieces: Pieces, content: ContentSum, expected: int = 0
    ) -> "Future[None]":
        """Write a new file; the future is done once it is durable.

        Args:
            name: below the folder.
            pieces: its bytes.
            content: sums them, and has all when this returns.
            expected: how many bytes they are before any compression; 0 if nobody knows.

        Raises:
            OSError: the disk is full, or failed.
            StoreUnavailableError: the store gives no answer.
        """

    def close(self) -> None:
        """Free threads."""


class UploadMemory:
    """How many bytes may be in memory on their way to an object store, in all sinks that share it.

    Attributes:
        most: so many; what alone has more goes alone.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._used = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        """Within this they count; waits until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= self.most)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


def open_sink(
    folder: StoreURI, *, item_bytes: int = 0, uploads: UploadMemory | None = None
) -> ValueSink:
    """The sink for the database in `folder`.

    Args:
        folder: the database's.
        item_bytes: what all processes together store of the item: the more, the larger its files.
        uploads: memory for what is on its way to an object store; None has no limit but the number
            of files at a time.
    """
    wanted = min(MOST_FILE_BYTES, item_bytes // _FILES_OF_ITEM)
    if folder.scheme == "file":
        return _LocalSink(folder.local_path, max(FILE_BYTES, wanted))
    if wanted > MOST_REMOTE_BYTES:
        return _StreamSink(folder, wanted, uploads)
    most = min(MOST_REMOTE_BYTES, max(REMOTE_FILE_BYTES, item_bytes // _OBJECTS_OF_ITEM))
    return _RemoteSink(folder, most, uploads)


class _LocalSink:
    """Files of a local disk, written past the page cache where the file system can do that.

    Each is synced by another thread while the next is written. See ADR 0013.
    """

    def __init__(self, folder: str, file_bytes: int) -> None:
        self.file_bytes = file_bytes
        self.writers = _WRITERS
        self._folder = folder
        os.makedirs(os.path.join(folder, VALUE_FOLDER), exist_ok=True)
        self._syncing = ThreadPoolExecutor(self.writers, thread_name_prefix="cairn-sync")

    def write(
        self, name: str, pieces: Pieces, content: ContentSum, expected: int = 0
    ) -> "Future[None]":
        path = os.path.join(self._folder, name)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            with aligned_buffer() as memory:
                _write_all(descriptor, pieces, memory, content)
        except OSError as exc:
            os.close(descriptor)
            raise OSError(exc.errno, exc.strerror, path) from exc
        except BaseException:
            os.close(descriptor)
            raise
        return self._syncing.submit(_sync_and_close, descriptor, path)

    def close(self) -> None:
        self._syncing.shutdown()


class _RemoteSink:
    """Objects of a store. Each is put together in memory: a store is asked again if it fails.

    One thread hands all of them over, which takes two copies of an object for a moment: else each
    writer would hold two, and its own part of the heap would keep them. What is in memory is then
    the objects that are on their way, those that are put together, and two.
    """

    def __init__(
        self, folder: StoreURI, file_bytes: int, uploads: UploadMemory | None = None
    ) -> None:
        self.file_bytes = file_bytes
        self.writers = _REMOTE_MAKERS
        self._objects = ObjectStore(folder, patient=True)
        self._handing_over = ThreadPoolExecutor(1, thread_name_prefix="cairn-upload")
        self._sending = ThreadPoolExecutor(_REMOTE_WRITERS, thread_name_prefix="cairn-sent")
        self._window = _Window(_REMOTE_WRITERS, max(1, MOST_REMOTE_BYTES // file_bytes))
        self._uploads = uploads

    def write(
        self, name: str, pieces: Pieces, content: ContentSum, expected: int = 0
    ) -> "Future[None]":
        with contextlib.ExitStack() as held:
            held.enter_context(_taken(self._uploads, _COPIES_OF_AN_OBJECT * expected))
            value = [_put_together(pieces, content, expected)]
            held.enter_context(self._window.place())
            answer = self._handing_over.submit(self._hand_over, name, value).result()
            return self._sending.submit(_answered, answer, held.pop_all())

    def _hand_over(self, name: str, value: list[bytearray]) -> Callable[[], bytes]:
        """Has the client copy it, and takes it out of the list: nobody holds it any more."""
        return self._objects.start_write(name, value.pop())

    def close(self) -> None:
        self._handing_over.shutdown()
        self._sending.shutdown()


class _StreamSink:
    """Large objects of a store, each an upload of many requests, of which it holds one or two.

    The store's checksum of each is compared with ours when it is whole.
    """

    def __init__(
        self, folder: StoreURI, file_bytes: int, uploads: UploadMemory | None = None
    ) -> None:
        self.file_bytes = file_bytes
        self.writers = _REMOTE_WRITERS
        self._files = open_files(folder)
        self._uploads = uploads

    def write(
        self, name: str, pieces: Pieces, content: ContentSum, expected: int = 0
    ) -> "Future[None]":
        needed = min(_BLOCKS_OF_A_STREAM * BLOCK_BYTES, _COPIES_OF_AN_OBJECT * expected)
        with _taken(self._uploads, needed), self._files.open_write(name) as upload:
            for block in _blocks(pieces):
                content.update(block)
                upload.write(block)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        """No threads."""


def _answered(answer: Callable[[], bytes], held: contextlib.ExitStack) -> None:
    """The store has it; what was held for it is free then, and told what was raised."""
    with held:
        answer()


def _next_size(pieces: Pieces, memory: memoryview | None = None) -> int | None:
    """Have the piece filled that was asked for; how large the next one is, None after the last."""
    try:
        return next(pieces) if memory is None else pieces.send(memory)
    except StopIteration:
        return None


def _put_together(pieces: Pieces, content: ContentSum, expected: int) -> bytearray:
    """All bytes; so many as are expected, unless they are compressed."""
    value, filled = bytearray(expected), 0
    size = _next_size(pieces)
    while size is not None:
        value = _with_room(value, filled, size)
        start, filled = filled, filled + size
        size = _next_size(pieces, memoryview(value)[start:filled])
    if filled < len(value):
        value = value[:filled]
    content.update(value)
    return value


def _with_room(memory: bytearray, filled: int, size: int) -> bytearray:
    """The memory, or a copy in larger memory: what others look into can't grow."""
    if filled + size <= len(memory):
        return memory
    return memory[:filled] + bytearray(max(size, filled))


def _taken(uploads: UploadMemory | None, nbytes: int) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if uploads is None else uploads.taken(nbytes)


def _blocks(pieces: Pieces) -> Iterator[bytes]:
    """The same bytes, so many at a time as an upload sends."""
    buffer, filled = bytearray(2 * BLOCK_BYTES), 0
    size = _next_size(pieces)
    while size is not None:
        buffer = _with_room(buffer, filled, size)
        start, filled = filled, filled + size
        size = _next_size(pieces, memoryview(buffer)[start:filled])
        sent = 0
        for sent in range(BLOCK_BYTES, filled + 1, BLOCK_BYTES):
            yield bytes(memoryview(buffer)[sent - BLOCK_BYTES : sent])
        buffer[: filled - sent] = buffer[sent:filled]
        filled -= sent
    if filled:
        yield bytes(memoryview(buffer)[:filled])


class _Window:
    """How many objects are on their way at a time."""

    def __init__(self, most: int, first: int) -> None:
        """`first` at first, and `most` at most."""
        self._most = most
        self._wide, self._sent = min(first, most), 0
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Send an object within this.

        Raises:
            BaseException: what the sending of another has raised.
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
                soon = time.monotonic() - began < _SOON_SECONDS
                self._wide = min(2 * self._wide, self._most) if soon else max(1, self._wide // 2)
                self._changed.notify_all()


def _write_all(descriptor: int, pieces: Pieces, memory: memoryview, content: ContentSum) -> None:
    """Write a new file, `memory` by `memory`; what is left at its end through the page cache.

    There the bytes are summed too: they lie as in the file, in whole words, and are in the cache.
    """
    at = 0
    set_direct(descriptor, wanted=True)
    fillings = _fillings(pieces, memory, content)
    while filled := _next(fillings):
        write_from(descriptor, memory[:filled], at)
        at += filled


def _next(fillings: Iterator[int]) -> int:
    """How many bytes there are this time; 0 after the last."""
    with _filling:
        return next(fillings, 0)


def _fillings(pieces: Pieces, memory: memoryview, content: ContentSum) -> Iterator[int]:
    """Fill `memory` with the next bytes, again and again; gives how many are to be written.

    These are whole blocks, but for the last time. What a piece has beyond them goes to the front.
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
        alone = memoryview(bytearray(size))  # a chunk that is larger than all of it
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


def _sync_and_close(descriptor: int, path: str) -> None:
    try:
        os.fsync(descriptor)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, path) from exc
    finally:
        os.close(descriptor)
