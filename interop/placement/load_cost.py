"""Cost of a load: bytes that are read, and bytes in a process's memory meanwhile.

It models a restore: each process reads, leaf by leaf and once, the chunks that its devices need; at
most `HOST_BYTES` of leaves are on the host at a time.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from cairn.interop.partition_axis import entry_axes
from cairn.interop.placement.process_grid import ProcessGrid
from cairn.interop.placement.specs import Entries
from cairn.storage.reading.leaf_reads import HOST_BYTES, MOST_LOCAL_THREADS, REMOTE_THREADS
from cairn.storage.reading.local_shards import RUN_BYTES
from cairn.storage.reading.remote_shards import BUDGET_BYTES

__all__ = ["LoadCost", "PlacedArray", "load_cost"]


class PlacedArray(NamedTuple):
    """A stored leaf and its placement.

    Attributes:
        item: name of the leaf's item; items are read one after another.
        shape: stored shape; of typed keys with the axes of their words.
        entries: mesh axes of each dimension.
        shard_shape: shape of one device's shard.
        stored_bits: bits of an element as it is stored.
        itemsize: bytes of an element in memory, in the stored dtype.
        cast_itemsize: bytes of an element in the loaded leaf; differs from `itemsize` if it is
            cast.
        chunks: chunk shape; None: the leaf is one chunk.
        shards: shape of a stored shard, which holds several chunks; None: there are no such shards.
    """

    item: str
    shape: tuple[int, ...]
    entries: Entries
    shard_shape: tuple[int, ...]
    stored_bits: int
    itemsize: int
    cast_itemsize: int
    chunks: tuple[int, ...] | None
    shards: tuple[int, ...] | None


class LoadCost(NamedTuple):
    """Bytes that a load needs.

    Attributes:
        host: most bytes on the host of a process: leaves on their way to devices, and read buffers.
        read: most bytes that a process reads.
        read_in_all: sum of the bytes that all processes read.
    """

    host: int
    read: int
    read_in_all: int


def load_cost(arrays: Sequence[PlacedArray], grid: ProcessGrid, *, local: bool) -> LoadCost:
    """Return the cost of a load of these arrays.

    Args:
        arrays: the leaves, in the order in which they are read.
        grid: the devices of each process.
        local: whether the store is a folder, from which chunks are read without extra buffers.
    """
    read = read_in_all = 0
    reads: dict[object, tuple[int, int]] = {}
    for array in arrays:
        alike = (array.shape, array.entries, array.chunks, array.stored_bits)
        if alike not in reads:
            reads[alike] = _read(array, grid)
        most, in_all = reads[alike]
        read += most
        read_in_all += in_all
    by_item: dict[str, list[PlacedArray]] = {}
    for array in arrays:
        by_item.setdefault(array.item, []).append(array)
    waiting = max((_waiting(some, grid) for some in by_item.values()), default=0)
    return LoadCost(waiting + _buffers(arrays, local), read, read_in_all)


def _waiting(arrays: Sequence[PlacedArray], grid: ProcessGrid) -> int:
    """Return the most bytes of an item's leaves on the host at once.

    It is `HOST_BYTES`, or one larger leaf, and the same again in the new dtype for cast leaves.
    """
    elements = [grid.box_count(array.entries) * prod(array.shard_shape) for array in arrays]
    parts = [count * array.itemsize for count, array in zip(elements, arrays, strict=True)]
    window = min(sum(parts), max(HOST_BYTES, *parts))
    cast = [
        count * array.cast_itemsize if array.cast_itemsize != array.itemsize else 0
        for count, array in zip(elements, arrays, strict=True)
    ]
    larger = max(array.cast_itemsize / array.itemsize for array in arrays)
    return window + min(sum(cast), max(int(window * larger), *cast))


def _buffers(arrays: Iterable[PlacedArray], local: bool) -> int:
    """Return the most bytes of read buffers that threads hold, besides the leaves themselves."""
    largest = stored = 0
    for array in arrays:
        cut = array.chunks if local else array.shards or array.chunks
        largest = max(largest, prod(array.shape if cut is None else cut) * array.itemsize)
        stored += prod(array.shape) * array.itemsize
    if local:
        return min(stored, MOST_LOCAL_THREADS * max(largest, RUN_BYTES))
    return min(stored, max(BUDGET_BYTES, REMOTE_THREADS * largest))


def _read(array: PlacedArray, grid: ProcessGrid) -> tuple[int, int]:
    """Return the most bytes of a leaf that a process reads, and the sum over all processes."""
    if 0 in array.shape:
        return 0, 0
    entries = [*array.entries, *[None] * (len(array.shape) - len(array.entries))]
    chunks = array.chunks if array.chunks is not None else array.shape
    most = in_all = array.stored_bits
    used: set[str] = set()
    for length, chunk, entry in zip(array.shape, chunks, entries, strict=True):
        axes = entry_axes(entry)
        used.update(axes)
        sizes = tuple((grid.sizes[axis], grid.box[axis]) for axis in axes)
        largest, together = _covered(length, chunk, sizes)
        most *= largest
        in_all *= together
    alike = prod(size // grid.box[axis] for axis, size in grid.sizes.items() if axis not in used)
    return -(-most // 8), -(-in_all * alike // 8)


@lru_cache(maxsize=4096)
def _covered(length: int, chunk: int, axes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Return how many elements along one dimension the chunks cover that processes read.

    Args:
        length: length of the dimension.
        chunk: length of a chunk along the dimension.
        axes: for each mesh axis that splits the dimension: all its devices, those of a process.

    Returns:
        The most of any process; the sum over processes with different parts of the dimension.
    """
    parts = prod(size for size, _ in axes)
    grid = [count for size, box in axes for count in (size // box, box)]
    # Axes that number the processes' boxes come first, then the axes inside a box.
    order = [*range(0, 2 * len(axes), 2), *range(1, 2 * len(axes), 2)]
    per_process = prod(box for _, box in axes)
    boxes = np.arange(parts, dtype=np.int64).reshape(grid).transpose(order)
    number = boxes.reshape(-1, per_process)
    width = length // parts
    first, last = number * width // chunk, (number * width + width - 1) // chunk
    touched = (last - first + 1).sum(axis=1)
    shared = (first[:, 1:] == last[:, :-1]).sum(axis=1)
    elements = (touched - shared) * chunk
    return int(elements.max()), int(elements.sum())
