"""Direct I/O on a local disk, where the file system supports it.

Direct I/O transfers between the disk and aligned memory without the page cache. It takes half of
the processor time per byte, and leaves the rest of the host's page cache alone. ADR 0013 has the
gain for writes, ADR 0042 that for reads.

Source: open(2), O_DIRECT; preadv2(2), RWF_NOWAIT; madvise(2), MADV_POPULATE_WRITE.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

__all__ = [
    "BUFFER_BYTES",
    "DIRECT_IO",
    "DISK_ALIGNMENT",
    "aligned_buffer",
    "drop_cached",
    "is_direct",
    "read_blocks",
    "read_into",
    "set_direct",
    "should_use_direct_io",
    "write_from",
]

DIRECT_IO: Final = "CAIRN_DIRECT_IO"
"""Environment variable; "0" disables direct I/O."""

BUFFER_BYTES: Final = (4 << 20) + (64 << 10)
"""Size of an I/O buffer in bytes; each thread uses one.

A chunk of 4 MiB with its checksum fits, together with the rest of the block before it. Small enough
that the checksum finds the bytes in the processor's cache; large enough that threads seldom wait
for one whose crc32c holds the GIL.
"""

DISK_ALIGNMENT: Final = 4096
"""Alignment in bytes of offsets, lengths and memory for direct I/O."""

_DIRECT_BYTES: Final = 1 << 20
"""Size in bytes below which reads use the page cache: the next read is often soon and nearby."""

_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
_LARGE_PAGE: Final = 2 << 20
_MADV_POPULATE_WRITE: Final = 23
"""Constant of Linux since 5.14, which Python lacks."""

_MAX_BUFFERS: Final = 1024
"""Most buffers per `preadv` call: Linux's IOV_MAX."""

_CACHED_BYTES: Final = 256 << 10
"""Bytes per write to the page cache, as in `cp`. For larger writes Linux takes larger pages, from
memory that was free for long, which a virtual machine may first have to get back from its host."""

_free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
"""Free buffers, for reuse; they are never released."""


def _forget_buffers() -> None:
    """Clear the list in a forked child: the buffers are not mapped there."""
    global _free
    _free = queue.SimpleQueue()


os.register_at_fork(after_in_child=_forget_buffers)


@contextlib.contextmanager
def aligned_buffer() -> Iterator[memoryview]:
    """Yield `BUFFER_BYTES` of aligned memory with arbitrary contents, for the context."""
    try:
        memory = _free.get_nowait()
    except queue.Empty:
        memory = _aligned_memory()
    try:
        yield memory
    finally:
        _free.put(memory)


def should_use_direct_io(size: int) -> bool:
    """Return True if a read of `size` bytes should use direct I/O."""
    return size >= _DIRECT_BYTES and bool(_O_DIRECT) and os.environ.get(DIRECT_IO) != "0"


def is_direct(descriptor: int) -> bool:
    """Return True if an open file uses direct I/O."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _O_DIRECT)


def set_direct(descriptor: int, *, on: bool) -> None:
    """Turn direct I/O of an open file on or off.

    It stays off if the file system does not support it or the environment disables it.
    """
    on = on and os.environ.get(DIRECT_IO) != "0"
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (_O_DIRECT if on else 0))
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # EINVAL: the file system has no direct I/O
            raise


def read_into(descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
    """Fill buffers in order with the bytes of an open file from `offset` on.

    Cached bytes come from the page cache. Large reads of other bytes use direct I/O.

    Args:
        descriptor: descriptor of the file; no other thread may use it meanwhile.
        buffers: memory to fill.
        offset: offset of the first byte.

    Returns:
        The number of bytes read: less than the buffers hold if the file ends before.
    """
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    size = sum(map(len, left))
    for buffer in left:
        if len(buffer) >= _DIRECT_BYTES:  # for less, the call costs as much as it saves
            _map_pages(buffer)
    count = _past_cache(
        descriptor, offset, size, lambda: _read_direct(descriptor, left, offset, size)
    )
    return _read_cached(descriptor, left, offset) if count is None else count


def read_blocks(descriptor: int, start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes of an open file from `start` to `end`, or to its own end, in blocks.

    Reads as `read_into` does, without copies: every block is a view of one buffer, and is valid
    until the next block is requested.

    Args:
        descriptor: descriptor of the file; no other thread may use it meanwhile.
        start: offset of the first byte.
        end: offset just after the last byte.
    """
    with aligned_buffer() as memory:
        while start < end and (block := _block(descriptor, memory, start, end)):
            yield block
            start += len(block)


def drop_cached(descriptor: int) -> None:
    """Drop the page cache of an open file, so that the next read comes from the disk."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # not every file supports fsync
            os.fdatasync(descriptor)  # dirty pages are not dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_from(descriptor: int, data: memoryview, offset: int) -> None:
    """Write bytes to an open file at `offset`, with direct I/O if `set_direct` turned it on.

    Direct I/O requires aligned memory in `data`. The part after its last whole block goes through
    the page cache; so do all bytes if the file system requires another alignment.

    Raises:
        OSError: the disk is full, or failed.
    """
    whole = len(data) - len(data) % DISK_ALIGNMENT
    done = 0
    while done < len(data):
        direct = is_direct(descriptor)
        if direct and done == whole:
            set_direct(descriptor, on=False)
            continue
        end = whole if direct else min(len(data), done + _CACHED_BYTES)
        try:
            done += os.pwrite(descriptor, data[done:end], offset + done)
        except OSError as exc:
            if not direct or exc.errno != errno.EINVAL:
                raise
            set_direct(descriptor, on=False)  # another alignment, or no direct I/O at all


def _block(descriptor: int, memory: memoryview, start: int, end: int) -> memoryview:
    """Read the next block into `memory`; return an empty view at the end of the file."""
    before = start % DISK_ALIGNMENT
    size = min(end - start, len(memory) - before)
    whole = -(-(before + size) // DISK_ALIGNMENT) * DISK_ALIGNMENT
    taken = _past_cache(
        descriptor, start, size, lambda: os.preadv(descriptor, [memory[:whole]], start - before)
    )
    if taken is not None:
        return memory[before : min(taken, before + size)]
    return memory[: _read_cached(descriptor, [memory[:size]], start)]


def _past_cache(descriptor: int, offset: int, size: int, read: Callable[[], int]) -> int | None:
    """Run `read` with direct I/O; return None if these bytes should use the page cache."""
    if not should_use_direct_io(size) or not _RWF_NOWAIT:
        return None
    # The page cache has them already; both ends stand for the rest.
    if all(_has(descriptor, at) for at in (offset, offset + size - 1)):
        return None
    set_direct(descriptor, on=True)
    try:
        return read() if is_direct(descriptor) else None
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return None  # EINVAL: another alignment, or no direct I/O at all
    finally:
        set_direct(descriptor, on=False)


def _read_cached(descriptor: int, left: list[memoryview], offset: int) -> int:
    """Fill the buffers by `preadv`, repeated until they are full or the file ends."""
    left = left.copy()
    count = 0
    while left and (filled := os.preadv(descriptor, left[:_MAX_BUFFERS], offset + count)):
        count += filled
        while left and filled >= len(left[0]):
            filled -= len(left.pop(0))
        if filled:
            left[0] = left[0][filled:]
    return count


def _read_direct(descriptor: int, left: list[memoryview], offset: int, size: int) -> int:
    """Read whole blocks into aligned memory and copy the requested bytes to their buffers."""
    end = offset + size
    done, buffers = 0, iter(np.frombuffer(buffer, np.uint8) for buffer in left if len(buffer))
    into, at = next(buffers), 0
    with aligned_buffer() as memory:
        values = np.frombuffer(memory, np.uint8)
        position = offset - offset % DISK_ALIGNMENT
        while position < end:
            length = min(len(values), -(-(end - position) // DISK_ALIGNMENT) * DISK_ALIGNMENT)
            taken = os.preadv(descriptor, [memory[:length]], position)
            first, last = max(0, offset - position), min(taken, end - position)
            while first < last:
                if at == len(into):
                    into, at = next(buffers), 0
                count = min(last - first, len(into) - at)
                into[at : at + count] = values[first : first + count]
                at, first, done = at + count, first + count, done + count
            if not taken or taken % DISK_ALIGNMENT:  # the file ends here
                return done
            position += taken
    return done


def _map_pages(memory: memoryview) -> None:
    """Have the kernel map the pages of new memory in one call.

    Otherwise each page of 4 KiB is a fault of its own, whose entry and exit cost a virtual machine
    more than the mapping: an eighth of the processor time of a restore. Does nothing where the
    system has no such call.
    """
    octets = np.frombuffer(memory, np.uint8)
    start = -(-octets.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (octets.ctypes.data + len(octets)) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = _madvise()
    if madvise is not None and start < end:
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_POPULATE_WRITE)


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """Return the C library's `madvise`: unlike `mmap.madvise` it releases Python's lock."""
    if not sys.platform.startswith("linux"):
        return None
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None), "madvise", None)
    return call


def _has(descriptor: int, offset: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], offset, _RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system does not support RWF_NOWAIT
    return True


def _aligned_memory() -> memoryview:
    """Return a new buffer, of huge pages if possible: the disk then gets larger requests.

    A forked child does not inherit it.
    """
    size = BUFFER_BYTES + _LARGE_PAGE
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for name in ("MADV_DONTFORK", "MADV_HUGEPAGE"):
        if hasattr(mmap, name):
            with contextlib.suppress(OSError):  # a kernel without large pages
                pages.madvise(getattr(mmap, name))
    octets = np.frombuffer(pages, np.uint8)
    start = -octets.ctypes.data % _LARGE_PAGE
    return octets[start : start + BUFFER_BYTES].data
