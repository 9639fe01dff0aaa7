"""Checksums of files, read in parallel in bounded memory.

Memory: `direct_io.BUFFER_BYTES` per thread on a local disk, some `files.BLOCK_BYTES` per thread on
other stores, for any number and size of files.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, Final, NamedTuple, TypeVar

import google_crc32c
import numpy as np

from cairn.storage.errors import NotFoundError
from cairn.storage.store.checksums import ContentSum, combine_crc32c
from cairn.storage.store.disk.direct_io import drop_cached, read_blocks
from cairn.storage.store.files import BLOCK_BYTES, Files, translated_errors
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

__all__ = [
    "PART_BYTES",
    "FileChecksum",
    "forget_cached",
    "read_crc32c",
    "read_file",
    "read_files",
]

PART_BYTES: Final = 32 << 20
"""Size in bytes of a part of a file; several threads read parts of one file."""

_DISK_THREADS: Final = max(2, min(4, os.cpu_count() or 1))
_NETWORK_THREADS: Final = 8
_TOLD_SECONDS: Final = 0.1

T = TypeVar("T")
U = TypeVar("U")
Buffer = np.ndarray[Any, np.dtype[np.uint8]]


class FileChecksum(NamedTuple):
    """Checksums of a file that was read.

    Attributes:
        name: path relative to the folder.
        size: bytes that were read.
        crc32c: eight hexadecimal digits.
        content: content sum, as `ContentSum.text` returns it.
    """

    name: str
    size: int
    crc32c: str
    content: str


def read_file(files: Files, name: str) -> FileChecksum:
    """Read one file completely, in the caller's thread, and return its checksums.

    Raises:
        NotFoundError: there is no such file.
        StoreUnavailableError: the store gives no answer.
    """
    return _Reader(files, _Meter(), on_disk=files.uri.scheme == "file").read(name)


def read_files(
    folder: StoreURI,
    names: Iterable[str],
    *,
    threads: int | None = None,
    past_cache: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Iterator[FileChecksum]:
    """Read files completely, several at once; yield their checksums in the order of `names`.

    Args:
        folder: folder of the files.
        names: paths relative to it; largest files first makes the best use of the threads.
        threads: number of concurrent reads; None: a number that suits the store.
        past_cache: whether to read from the disk, not from the page cache; ignored in other stores.
        progress: called regularly, in the caller's thread, with the bytes read since its last call;
            an exception from it ends the reading.

    Raises:
        NotFoundError: a file does not exist.
        StoreUnavailableError: the store gives no answer.
    """
    files_to_read = list(names)
    if not files_to_read:
        return
    on_disk = folder.scheme == "file"
    count = min(threads or (_DISK_THREADS if on_disk else _NETWORK_THREADS), len(files_to_read))
    readers: SimpleQueue[_Reader] = SimpleQueue()
    meter = _Meter()
    for _ in range(count):
        readers.put(_Reader(open_files(folder), meter, on_disk=on_disk, past_cache=past_cache))

    def read(name: str) -> FileChecksum:
        reader = readers.get()
        try:
            return reader.read(name)
        finally:
            readers.put(reader)

    yield from _in_threads(count, read, files_to_read, meter, progress)


def forget_cached(folder: StoreURI, names: Iterable[str]) -> None:
    """Drop files from the page cache, so that the next read comes from the disk.

    Files that do not exist are skipped. Use it before reads that do not go through `read_files`. It
    does nothing in stores other than local disks.
    """
    if folder.scheme != "file":
        return
    files = open_files(folder)
    for name in names:
        with contextlib.suppress(NotFoundError), files.open_read(name) as stream:
            drop_cached(stream.fileno())


def read_crc32c(
    files: Files, name: str, size: int, *, progress: Callable[[int], None] | None = None
) -> tuple[int, str]:
    """Read one file, its parts in several threads; return the bytes read and their crc32c.

    Args:
        files: folder of the file.
        name: path relative to it.
        size: bytes to read, from the start of the file.
        progress: as in `read_files`.

    Raises:
        NotFoundError: there is no such file.
        StoreUnavailableError: the store gives no answer.
    """
    on_disk = files.uri.scheme == "file"
    starts = range(0, size, PART_BYTES) or range(1)
    meter = _Meter()

    def read(start: int) -> tuple[int, int]:
        reader = _Reader(files, meter, on_disk=on_disk)
        return reader.read_part(name, start, min(size, start + PART_BYTES))

    total = crc = 0
    threads = min(_DISK_THREADS if on_disk else _NETWORK_THREADS, len(starts))
    for length, part in _in_threads(threads, read, starts, meter, progress):
        total, crc = total + length, combine_crc32c(crc, part, length)
    return total, f"{crc:08x}"


def _in_threads(
    threads: int,
    call: Callable[[T], U],
    arguments: Sequence[T],
    meter: "_Meter",
    progress: Callable[[int], None] | None,
) -> Iterator[U]:
    """Yield the results of `call` in order, and report the bytes read to `progress`."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="cairn-checksum")
    try:
        for future in [pool.submit(call, argument) for argument in arguments]:
            while progress is not None and not wait([future], _TOLD_SECONDS).done:
                progress(meter.take())
            yield future.result()
            if progress is not None:
                progress(meter.take())
    finally:
        meter.stopped = True
        pool.shutdown(cancel_futures=True)


class _Meter:
    """Counter of bytes read since the last report, and the flag that stops the readers."""

    def __init__(self) -> None:
        self.stopped = False
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    def take(self) -> int:
        with self._lock:
            taken, self._bytes = self._bytes, 0
        return taken


class _Reader:
    """Reader of one file after another."""

    def __init__(
        self, files: Files, meter: _Meter, *, on_disk: bool, past_cache: bool = False
    ) -> None:
        self._files = files
        self._meter = meter
        self._on_disk = on_disk
        self._past_cache = past_cache

    def read(self, name: str) -> FileChecksum:
        size, crc, content = 0, 0, ContentSum()
        for block in self._blocks(name, 0, sys.maxsize):
            size, crc = size + len(block), google_crc32c.extend(crc, block)
            content.update(block)
        return FileChecksum(name, size, f"{crc:08x}", content.text())

    def read_part(self, name: str, start: int, end: int) -> tuple[int, int]:
        """Return the number of bytes between `start` and `end`, and their crc32c."""
        size, crc = 0, 0
        for block in self._blocks(name, start, end):
            size, crc = size + len(block), google_crc32c.extend(crc, block)
        return size, crc

    def _blocks(self, name: str, start: int, end: int) -> Iterator[Buffer | bytes]:
        read = self._read if self._on_disk else self._fetched
        for block in read(name, start, end):
            yield block
            self._meter.add(len(block))
            if self._meter.stopped:
                return

    def _read(self, name: str, start: int, end: int) -> Iterator[Buffer]:
        with translated_errors(self._files.uri / name), self._files.open_read(name) as stream:
            if self._past_cache:
                drop_cached(stream.fileno())
            yield from map(np.asarray, read_blocks(stream.fileno(), start, end))

    def _fetched(self, name: str, start: int, end: int) -> Iterator[bytes]:
        while block := self._files.read_range(name, start, min(end, start + BLOCK_BYTES)):
            yield block
            start += len(block)
            if len(block) < BLOCK_BYTES or start >= end:
                return
