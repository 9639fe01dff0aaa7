"""Reads and writes of a local disk past its page cache, where the file system can do that.

The disk fetches bytes from aligned memory, and puts them there, instead of into memory that the
kernel has to find first: half of the processor's time for as many bytes, and what else the host
keeps in its cache stays. See ADR 0013 for what writing gains, ADR 0042 for reading.

Source: open(2), O_DIRECT; preadv2(2), RWF_NOWAIT.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

__all__ = [
    "BUFFER_BYTES",
    "DIRECT_IO",
    "DISK_ALIGNMENT",
    "aligned_buffer",
    "drop_cached",
    "goes_direct",
    "is_direct",
    "read_blocks",
    "read_into",
    "set_direct",
    "write_from",
]

DIRECT_IO: Final = "CAIRN_DIRECT_IO"
"""Environment variable; "0" has files written and read through the page cache."""

BUFFER_BYTES: Final = (4 << 20) + (64 << 10)
"""Written or read at a time; one per thread that does.

A chunk of 4 MiB with its checksum lies in one, behind what is left of the block before. Few enough
to be summed while the processor's cache has them, so many that threads seldom wait for one whose
crc32c holds Python's lock.
"""

DISK_ALIGNMENT: Final = 4096
"""What goes past the page cache begins and ends at multiples of this, as does its memory."""

_DIRECT_BYTES: Final = 1 << 20
"""Fewer are read through the page cache: who asks for little asks again soon, and near it."""

_O_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)
_RWF_NOWAIT: Final[int] = getattr(os, "RWF_NOWAIT", 0)
_LARGE_PAGE: Final = 2 << 20
_MOST_BUFFERS: Final = 1024
"""Of one call, as Linux has it (IOV_MAX)."""

_CACHED_BYTES: Final = 256 << 10
"""Written to the page cache at a time, as `cp` does: Linux finds larger pages for larger writes, in
memory that has long been free, which a virtual machine may first have to get back."""

_free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
"""Kept from use to use, as many as were once needed at a time."""


def _forget_buffers() -> None:
    """A child that was forked does not have them."""
    global _free
    _free = queue.SimpleQueue()


os.register_at_fork(after_in_child=_forget_buffers)


@contextlib.contextmanager
def aligned_buffer() -> Iterator[memoryview]:
    """`BUFFER_BYTES` of aligned memory, whose contents are whatever was there before."""
    try:
        memory = _free.get_nowait()
    except queue.Empty:
        memory = _aligned_memory()
    try:
        yield memory
    finally:
        _free.put(memory)


def goes_direct(size: int) -> bool:
    """Whether so many bytes are read past the page cache, where the file system can do that."""
    return size >= _DIRECT_BYTES and bool(_O_DIRECT) and os.environ.get(DIRECT_IO) != "0"


def is_direct(descriptor: int) -> bool:
    """Whether an open file goes past the page cache."""
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & _O_DIRECT)


def set_direct(descriptor: int, *, wanted: bool) -> None:
    """Have an open file go past the page cache from now on, or through it.

    Where the file system has no such thing, or the environment forbids it, through it.
    """
    wanted = wanted and os.environ.get(DIRECT_IO) != "0"
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (_O_DIRECT if wanted else 0))
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # the file system has no such thing
            raise


def read_into(descriptor: int, buffers: Sequence[memoryview | bytearray], offset: int) -> int:
    """Fill buffers, one after the other, with what an open file holds from `offset` on.

    What is in the page cache comes from there. Much that is not goes past it.

    Args:
        descriptor: of the file; no other thread uses it meanwhile.
        buffers: where the bytes go.
        offset: of the first byte.

    Returns:
        how many bytes there were: fewer than there is room for, if the file ends before.
    """
    left = [memoryview(buffer).cast("B") for buffer in buffers]
    size = sum(map(len, left))
    found = _past_cache(
        descriptor, offset, size, lambda: _read_direct(descriptor, left, offset, size)
    )
    return _read_cached(descriptor, left, offset) if found is None else found


def read_blocks(descriptor: int, start: int, end: int) -> Iterator[memoryview]:
    """What an open file holds from `start` to `end`, or to its own end, block by block.

    Read as `read_into` reads, but not copied: each block is a part of one buffer, which holds the
    next one once that is asked for.

    Args:
        descriptor: of the file; no other thread uses it meanwhile.
        start: of the first byte.
        end: behind the last one.
    """
    with aligned_buffer() as memory:
        while start < end and (block := _block(descriptor, memory, start, end)):
            yield block
            start += len(block)


def drop_cached(descriptor: int) -> None:
    """Have an open file read from the disk: what the page cache has of it need not be there."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # not every file can be synced
            os.fdatasync(descriptor)  # what is yet to be written is not dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_from(descriptor: int, data: memoryview, offset: int) -> None:
    """Put bytes into an open file, from `offset` on; past the page cache if `set_direct` said so.

    Then `data` is aligned memory, and what is left beyond its last whole block goes through the
    page cache, as all does if the file system wants another alignment.

    Raises:
        OSError: the disk is full, or failed.
    """
    whole = len(data) - len(data) % DISK_ALIGNMENT
    done = 0
    while done < len(data):
        direct = is_direct(descriptor)
        if direct and done == whole:
            set_direct(descriptor, wanted=False)
            continue
        end = whole if direct else min(len(data), done + _CACHED_BYTES)
        try:
            done += os.pwrite(descriptor, data[done:end], offset + done)
        except OSError as exc:
            if not direct or exc.errno != errno.EINVAL:
                raise
            set_direct(descriptor, wanted=False)  # other alignment, or none of it after all


def _block(descriptor: int, memory: memoryview, start: int, end: int) -> memoryview:
    """The next block, in `memory`; empty where the file ends."""
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
    """What `read` gives, with the file open for direct I/O; None if these bytes are not read so."""
    if not goes_direct(size) or _is_cached(descriptor, offset, size):
        return None
    set_direct(descriptor, wanted=True)
    try:
        return read() if is_direct(descriptor) else None
    except OSError as exc:
        if exc.errno != errno.EINVAL:
            raise
        return None  # other alignment, or none of it after all
    finally:
        set_direct(descriptor, wanted=False)


def _read_cached(descriptor: int, left: list[memoryview], offset: int) -> int:
    """`preadv`, again for what it did not fill."""
    left = left.copy()
    found = 0
    while left and (filled := os.preadv(descriptor, left[:_MOST_BUFFERS], offset + found)):
        found += filled
        while left and filled >= len(left[0]):
            filled -= len(left.pop(0))
        if filled:
            left[0] = left[0][filled:]
    return found


def _read_direct(descriptor: int, left: list[memoryview], offset: int, size: int) -> int:
    """Whole blocks into aligned memory, and from there to where their bytes go."""
    end = offset + size
    found, buffers = 0, iter(np.frombuffer(one, np.uint8) for one in left if len(one))
    into, at = next(buffers), 0
    with aligned_buffer() as memory:
        values = np.frombuffer(memory, np.uint8)
        position = offset - offset % DISK_ALIGNMENT
        while position < end:
            wanted = min(len(values), -(-(end - position) // DISK_ALIGNMENT) * DISK_ALIGNMENT)
            taken = os.preadv(descriptor, [memory[:wanted]], position)
            first, last = max(0, offset - position), min(taken, end - position)
            while first < last:
                if at == len(into):
                    into, at = next(buffers), 0
                count = min(last - first, len(into) - at)
                into[at : at + count] = values[first : first + count]
                at, first, found = at + count, first + count, found + count
            if not taken or taken % DISK_ALIGNMENT:  # the file ends here
                return found
            position += taken
    return found


def _is_cached(descriptor: int, offset: int, size: int) -> bool:
    """Whether the page cache has both ends of these bytes; True if that can't be told."""
    if not _RWF_NOWAIT:
        return True
    return all(_has(descriptor, at) for at in (offset, offset + size - 1))


def _has(descriptor: int, offset: int) -> bool:
    try:
        os.preadv(descriptor, [bytearray(1)], offset, _RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system that does not know the question
    return True


def _aligned_memory() -> memoryview:
    """A buffer of large pages, if there are any: the disk is then asked for more at a time.

    A child that is forked meanwhile does not get it.
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
