"""The disk's own speed: threads that write and read past the page cache, and nothing else.

No project can be faster than this on the same bytes; how near each comes is what counts.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import storage_places as places

THREADS = 8
PIECE_BYTES = 4 << 20
LARGE_PAGE_BYTES = 2 << 20
BLOCK_BYTES = 4096
"""Direct I/O begins and ends at multiples of this, in memory as on the disk."""


def aligned(buffers: Iterable[Any]) -> mmap.mmap:
    """The bytes of all buffers, one after the other, from the start of a page, zeros at the end."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    memory = _fresh(sum(view.nbytes for view in views))
    for view in views:
        memory.write(view)
    return memory


def write(place: str, memory: mmap.mmap) -> None:
    """Writes the memory into a file for each thread, and syncs them."""
    os.makedirs(place)
    pieces = -(-len(memory) // PIECE_BYTES)
    each = -(-pieces // THREADS) * PIECE_BYTES

    def one(number: int) -> None:
        start = number * each
        with memoryview(memory) as view, view[start : start + each] as mine:
            descriptor = os.open(f"{place}/{number}", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
            try:
                for at in range(0, len(mine), PIECE_BYTES):
                    with mine[at : at + PIECE_BYTES] as piece:
                        if os.write(descriptor, piece) != len(piece):
                            raise OSError(f"{place}/{number}: not all was written")
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, range(THREADS)))


def read(place: str) -> int:
    """Reads every file into memory that nobody has touched yet; bytes read."""
    found = [(path, path.stat().st_size) for path in places.files(place)]
    memories = [_fresh(size) for _, size in found if size]
    descriptors = [os.open(path, os.O_RDONLY | os.O_DIRECT) for path, size in found if size]

    def one(piece: tuple[int, int]) -> int:
        number, at = piece
        with memoryview(memories[number]) as view, view[at : at + PIECE_BYTES] as part:
            return os.preadv(descriptors[number], [part], at)

    pieces = [
        (number, at)
        for number, memory in enumerate(memories)
        for at in range(0, len(memory), PIECE_BYTES)
    ]
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            total = sum(pool.map(one, pieces))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    expected = sum(size for _, size in found)
    if total != expected:
        raise RuntimeError(f"{place}: expected to read {expected} bytes, read {total}")
    return total


def copy_and_read_back(source: Path, target: Path) -> None:
    """Copies a file and reads the copy: three passes over the disk, a piece to each thread."""
    size = source.stat().st_size
    target.touch()
    flags = os.O_RDWR | os.O_DIRECT

    def one(number: int) -> None:
        memory = _in_large_pages(PIECE_BYTES)
        given, made = os.open(source, os.O_RDONLY | os.O_DIRECT), os.open(target, flags)
        try:
            for at in range(number * PIECE_BYTES, size, THREADS * PIECE_BYTES):
                whole = -(-min(PIECE_BYTES, size - at) // BLOCK_BYTES) * BLOCK_BYTES
                piece = memory[:whole]
                os.preadv(given, [piece], at)
                if os.pwrite(made, piece, at) != whole or os.preadv(made, [piece], at) != whole:
                    raise OSError(f"{target}: not all was written, or read")
        finally:
            os.close(given)
            os.close(made)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(one, range(THREADS)))
    os.truncate(target, size)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def can_read_and_write(folder: Path) -> bool:
    """Does the file system of this folder have direct I/O."""
    path = folder / "direct"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def _fresh(size: int) -> mmap.mmap:
    """Memory of its own, of whole blocks and as large as `size` at least."""
    return mmap.mmap(-1, max(1, -(-size // BLOCK_BYTES)) * BLOCK_BYTES)


def _in_large_pages(size: int) -> memoryview:
    """Memory that the disk is asked for in few parts, where the kernel has such pages."""
    memory = mmap.mmap(-1, size + LARGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    octets = np.frombuffer(memory, np.uint8)
    start = -octets.ctypes.data % LARGE_PAGE_BYTES
    return octets[start : start + size].data
