"""What we stored in an object store, read by ranges, each chunk checked on its way to its place.

As `local_shards` on a disk: places are those of the step's index, chunks are checked against their
crc32c and their digest, the index of a shard against what it must be. Other arrays (compressed,
packed, or of plain Orbax) are read by TensorStore. Imports no JAX.
"""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from cairn.storage.arrays import CRC_BYTES, Index, Region, bytes_of, overlap, shard_index
from cairn.storage.reading.local_shards import (
    StoredCut,
    checked_place,
    corners,
    damaged,
    ensure_saved,
)
from cairn.storage.reading.ranges import REQUEST_BYTES, Piece

__all__ = ["shard_pieces"]

_Touched = tuple[int, Index, list[Region]]
"""A chunk of a shard: its number, as they are stored, its first element, what is filled of it."""


def shard_pieces(array: StoredCut, origin: Index, regions: Sequence[Region]) -> Iterator[Piece]:
    """What to read to fill what the regions share with an outer shard.

    Args:
        array: the array; its places are told.
        origin: index of the shard's first element.
        regions: of the array's stored dtype, each with a part in the shard.

    Raises:
        CorruptionError: there is no such shard, or it has another size than it must have.
    """
    ref = checked_place(array, origin)
    size = math.prod(array.cut.chunk) * array.dtype.itemsize + CRC_BYTES
    for run in _runs(array, origin, regions, size):
        start = ref.offset + run[0][0] * size
        take = partial(_take, array, run)
        yield Piece(ref.file, start, start + len(run) * size, array.where, take)
    index = shard_index(*array.cut, array.dtype.itemsize)
    stop = ref.offset + ref.length
    ensure_index = partial(_ensure_index, array, origin, index)
    yield Piece(ref.file, stop - len(index), stop, array.where, ensure_index)


def _runs(
    array: StoredCut, origin: Index, regions: Sequence[Region], size: int
) -> Iterator[list[_Touched]]:
    """Chunks in which some region has a part, and that lie one after another."""
    chunk = array.cut.chunk
    run: list[_Touched] = []
    for number, at in corners(array.cut.shard, chunk, origin):
        touching = [one for one in regions if overlap(at, chunk, one.origin, one.values.shape)]
        if not touching:
            continue
        if run and (number != run[-1][0] + 1 or (len(run) + 1) * size > REQUEST_BYTES):
            yield run
            run = []
        run.append((number, at, touching))
    if run:
        yield run


def _take(array: StoredCut, run: list[_Touched], data: memoryview) -> None:
    """Check chunks that lie one after another, and put them where they go."""
    chunk = array.cut.chunk
    nbytes = math.prod(chunk) * array.dtype.itemsize
    size = nbytes + CRC_BYTES
    if len(data) != len(run) * size:
        raise damaged(array, run[0][1], f"{len(run) * size} bytes", f"{len(data)} before the end")
    for number, (_, at, regions) in enumerate(run):
        stored = data[number * size : (number + 1) * size]
        place = _place(at, chunk, regions)
        values = np.empty(chunk, array.dtype) if place is None else place
        bytes_of(values)[:] = stored[:nbytes]
        ensure_saved(array, at, values, bytes(stored[nbytes:]))
        if place is not None:
            continue
        for region in regions:
            shared = overlap(at, chunk, region.origin, region.values.shape)
            if shared is not None:
                region.part(shared.second)[...] = values[shared.first]


def _place(at: Index, chunk: Index, regions: Sequence[Region]) -> np.ndarray | None:
    """The one piece of memory that a chunk goes to as it is; None if there is no such."""
    if len(regions) != 1:
        return None
    shared = overlap(at, chunk, regions[0].origin, regions[0].values.shape)
    if shared is None:
        return None
    place = regions[0].part(shared.second)
    return place if place.shape == chunk and place.flags.c_contiguous else None


def _ensure_index(array: StoredCut, origin: Index, expected: bytes, data: memoryview) -> None:
    if data != expected:
        raise damaged(array, origin, "the index of its shard", "another")
