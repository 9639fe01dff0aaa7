"""The checksums of files, read back in parallel in bounded memory. Imports no JAX.

Memory: `BUFFER_BYTES` per thread on a local disk, some `files.BLOCK_BYTES` per thread on other
stores, whatever the number and the size of the files.
"""

import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

import google_crc32c
import numpy as np

from cairn.storage.store.checksums import ContentSum
from cairn.storage.store.files import BLOCK_BYTES, Files, mapped
from cairn.storage.store.opening import open_files
from cairn.storage.store.uri import StoreURI

__all__ = ["BUFFER_BYTES", "FileChecksum", "read_file", "read_files"]

BUFFER_BYTES: Final = 4 << 20
"""Bytes read at a time from a disk.

Few enough to be summed while the processor's cache has them, so many that threads seldom wait for
one whose crc32c holds Python's lock.
"""

_DISK_THREADS: Final = max(2, min(4, os.cpu_count() or 1))
_NETWORK_THREADS: Final = 8
_TOLD_SECONDS: Final = 0.1

Buffer = np.ndarray[Any, np.dtype[np.uint8]]


class FileChecksum(NamedTuple):
    """What reading a file gave.

    Attributes:
        name: path relative to the folder.
        size: bytes that were read.
        crc32c: of them, eight hexadecimal digits; None if it was not asked for.
        content: of them, what `ContentSum.text` gives.
    """

    name: str
    size: int
    crc32c: str | None
    content: str


def read_file(files: Files, name: str) -> FileChecksum:
    """Read one file from end to end, in the caller's thread; what it gave.

    Raises:
        NotFoundError: it is not there.
        StoreUnavailableError: the store gives no answer.
    """
    return _Reader(files, _Meter(), on_disk=files.uri.scheme == "file").read(name, with_crc=True)


def read_files(
    folder: StoreURI,
    names: Iterable[str],
    *,
    threads: int | None = None,
    content_only: Collection[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Iterator[FileChecksum]:
    """Read files from end to end, several at once; what each one gave, in the order of `names`.

    Args:
        folder: where they lie.
        names: paths relative to it. The largest first makes the best use of the threads.
        threads: how many read at once; None: as suits the store.
        content_only: names of files whose crc32c is not wanted. It costs as much as reading them.
        progress: called now and then, in the caller's thread, with the bytes that were read since
            the last time; what it raises ends the reading.

    Raises:
        NotFoundError: one of them is not there.
        StoreUnavailableError: the store gives no answer.
    """
    wanted = list(names)
    if not wanted:
        return
    on_disk = folder.scheme == "file"
    count = min(threads or (_DISK_THREADS if on_disk else _NETWORK_THREADS), len(wanted))
    readers: SimpleQueue[_Reader] = SimpleQueue()
    meter = _Meter()
    for _ in range(count):
        readers.put(_Reader(open_files(folder), meter, on_disk=on_disk))

    def read(name: str) -> FileChecksum:
        reader = readers.get()
        try:
            return reader.read(name, with_crc=name not in content_only)
        finally:
            readers.put(reader)

    pool = ThreadPoolExecutor(count, thread_name_prefix="cairn-checksum")
    try:
        for future in [pool.submit(read, name) for name in wanted]:
            while progress is not None and not wait([future], _TOLD_SECONDS).done:
                progress(meter.take())
            yield future.result()
            if progress is not None:
                progress(meter.take())
    finally:
        meter.stopped = True
        pool.shutdown(cancel_futures=True)


class _Meter:
    """Bytes that were read and not told yet; and whether to go on reading."""

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
    """Reads one file after another, with one buffer for all."""

    def __init__(self, files: Files, meter: _Meter, *, on_disk: bool) -> None:
        self._files = files
        self._meter = meter
        self._buffer: Buffer | None = np.empty(BUFFER_BYTES, np.uint8) if on_disk else None

    def read(self, name: str, *, with_crc: bool) -> FileChecksum:
        size, crc, content = 0, 0, ContentSum()
        blocks = self._fetched(name) if self._buffer is None else self._read(name, self._buffer)
        for block in blocks:
            size += len(block)
            if with_crc:
                crc = google_crc32c.extend(crc, block)
            content.update(block)
            self._meter.add(len(block))
            if self._meter.stopped:
                break
        return FileChecksum(name, size, f"{crc:08x}" if with_crc else None, content.text())

    def _read(self, name: str, buffer: Buffer) -> Iterator[Buffer]:
        with mapped(self._files.uri / name), self._files.open_read(name) as stream:
            while count := stream.readinto(buffer):  # type: ignore[attr-defined]
                yield buffer[:count]

    def _fetched(self, name: str) -> Iterator[bytes]:
        start = 0
        while block := self._files.read_range(name, start, start + BLOCK_BYTES):
            yield block
            start += len(block)
            if len(block) < BLOCK_BYTES:
                return
