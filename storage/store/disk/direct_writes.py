"""Writer of a new file that bypasses the page cache, in a thread, and reads the file back."""

import ctypes
import functools
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Final

import google_crc32c
import numpy as np

from cairn.storage.store.checksums import combine_crc32c
from cairn.storage.store.disk.direct_io import (
    aligned_buffer,
    is_direct,
    read_blocks,
    set_direct,
    write_from,
)

__all__ = ["DirectWrites"]

_BUFFERS: Final = 3
"""Buffers per file: one being filled, one being written, one waiting."""

_READ_BACK_AT_ONCE: Final = 2
"""Number of buffers that are read back at the same time, while others are written."""

_SMALL_BYTES: Final = 1 << 20
"""Size in bytes below which a file goes through the page cache, since it is soon read again."""

_WRITE_OUT_BYTES: Final = 32 << 20
"""Bytes in the page cache from which write-out starts, so that the later fsync is short."""

_SYNC_FILE_RANGE_WRITE: Final = 2


class DirectWrites:
    """Writer of the bytes of a new file. Used by one thread.

    Without direct I/O in the file system, the bytes go through the page cache.
    """

    def __init__(self, descriptor: int, path: str, *, read_back: bool) -> None:
        """Prepare writes to an empty file.

        Args:
            descriptor: descriptor of the file, open for writing; only used here until `close`.
            path: path of the file.
            read_back: whether to read the bytes back, for `crc32c`.
        """
        self._descriptor = descriptor
        self._path = path
        self._read_back = read_back
        self._small = bytearray()
        self._writing: ThreadPoolExecutor | None = None
        self._reading = ThreadPoolExecutor(_READ_BACK_AT_ONCE, "cairn-read-back")
        self._into, self._filled, self._sent, self._on_their_way = memoryview(b""), 0, 0, 0
        self._buffers = ExitStack()
        self._free: SimpleQueue[memoryview] = SimpleQueue()
        self._writes: deque[Future[None]] = deque()
        self._reads: list[Future[tuple[int, int]]] = []

    def write(self, data: memoryview) -> None:
        """Append bytes; the caller may change `data` afterwards.

        Raises:
            OSError: the disk is full, or failed; perhaps for bytes of an earlier call.
        """
        if self._writing is None:
            self._small += data
            if len(self._small) < _SMALL_BYTES:
                return
            set_direct(self._descriptor, on=True)
            self._writing = ThreadPoolExecutor(1, "cairn-write")
            for _ in range(_BUFFERS):
                self._free.put(self._buffers.enter_context(aligned_buffer()))
            data, self._small = memoryview(self._small), bytearray()
        left = np.frombuffer(data, np.uint8)
        while len(left):
            if self._filled == len(self._into):
                self._send()
                while self._free.empty():
                    self._writes.popleft().result()
                self._into = self._free.get()
            into = np.frombuffer(self._into, np.uint8)[self._filled :]
            count = min(len(left), len(into))
            into[:count], left = left[:count], left[count:]
            self._filled += count

    def finish(self) -> None:
        """Write all remaining bytes; the caller makes them durable with an fsync.

        Raises:
            OSError: the disk is full, or failed.
        """
        if self._writing is None:
            self._put(memoryview(self._small), 0)
            return
        self._send()
        while self._writes:
            self._writes.popleft().result()

    def crc32c(self) -> str | None:
        """Return the crc32c of all bytes as read back, in eight hexadecimal digits.

        None without `read_back`. Call this only after `finish`.

        Raises:
            OSError: the disk failed.
        """
        if not self._read_back:
            return None
        crc = 0
        for part in self._reads:
            length, of_part = part.result()
            crc = combine_crc32c(crc, of_part, length)
        return f"{crc:08x}"

    def close(self) -> None:
        """Stop all writes and reads, and free the buffers."""
        if self._writing is not None:
            self._writing.shutdown(cancel_futures=True)
        self._reading.shutdown(cancel_futures=True)
        self._buffers.close()

    def _send(self) -> None:
        """Pass the filled part of the buffer to the writing thread."""
        if self._filled and self._writing is not None:
            memory, at = self._into[: self._filled], self._sent
            self._writes.append(self._writing.submit(self._put_and_free, memory, at, self._into))
        self._sent += self._filled
        self._into, self._filled = memoryview(b""), 0

    def _put_and_free(self, data: memoryview, at: int, memory: memoryview) -> None:
        self._put(data, at)
        self._free.put(memory)

    def _put(self, data: memoryview, at: int) -> None:
        write_from(self._descriptor, data, at)
        end = at + len(data)
        if end - self._on_their_way >= _WRITE_OUT_BYTES and not is_direct(self._descriptor):
            _write_out(self._descriptor, self._on_their_way, end)
            self._on_their_way = end
        if self._read_back:
            self._reads.append(self._reading.submit(self._read, at, end))

    def _read(self, start: int, end: int) -> tuple[int, int]:
        """Return the number of bytes read between `start` and `end`, and their crc32c."""
        descriptor = os.open(self._path, os.O_RDONLY)
        try:
            length = crc = 0
            for block in read_blocks(descriptor, start, end):
                length, crc = length + len(block), google_crc32c.extend(crc, np.asarray(block))
        finally:
            os.close(descriptor)
        return length, crc


def _write_out(descriptor: int, start: int, end: int) -> None:
    """Start writing dirty pages of an open file to the disk, so that its fsync is short.

    Returns at once and guarantees nothing. Does nothing on systems without the call.
    """
    call = _sync_file_range()
    if call is not None:
        call(descriptor, ctypes.c_int64(start), ctypes.c_int64(end - start), _SYNC_FILE_RANGE_WRITE)


@functools.cache
def _sync_file_range() -> Callable[..., int] | None:
    """Return Linux's sync_file_range(2); None on other systems."""
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    return call
