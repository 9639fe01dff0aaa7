"""Boxes of an array that are filled from its stored chunks. Functions of shapes, without I/O."""

import itertools
import math
import mmap
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

__all__ = [
    "BoxBuffer",
    "Overlap",
    "SmallArrays",
    "aligned_empty",
    "grid_overlaps",
    "origin_of",
    "overlap",
]

ALIGNMENT: Final = 64
"""Alignment in bytes at which JAX uses a host array as a CPU buffer without a copy."""

_NUMPY_LARGE_BYTES: Final = 4 << 20

_SHARED_BYTES: Final = 1 << 20
"""Size in bytes of an allocation that `SmallArrays` divides into arrays."""

Index = tuple[int, ...]


class BoxBuffer(NamedTuple):
    """Memory for a box of an array, to be filled.

    Attributes:
        origin: index of its first element in the array.
        values: array with the box's shape, into which elements are read.
    """

    origin: Index
    values: np.ndarray[Any, Any]

    def part(self, box: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        """Return a view of the elements in `box`; also of an array without axes."""
        index: Any = (*box, ...)
        view: np.ndarray[Any, Any] = self.values[index]
        return view


class Overlap(NamedTuple):
    """Intersection of two boxes.

    Attributes:
        first: the intersection, in coordinates of the first box.
        second: the intersection, in coordinates of the second.
    """

    first: tuple[slice, ...]
    second: tuple[slice, ...]


def origin_of(index: tuple[slice, ...] | None) -> Index:
    """Return the index of a box's first element, from JAX's slices of a shard; None means 0-d."""
    return tuple(part.start or 0 for part in index or ())


def overlap(
    origin: Sequence[int],
    shape: Sequence[int],
    other_origin: Sequence[int],
    other_shape: Sequence[int],
) -> Overlap | None:
    """Return the intersection of two boxes of an array; None if it is empty."""
    first, second = [], []
    for a, n, b, m in zip(origin, shape, other_origin, other_shape, strict=True):
        start, stop = max(a, b), min(a + n, b + m)
        if start >= stop:
            return None
        first.append(slice(start - a, stop - a))
        second.append(slice(start - b, stop - b))
    return Overlap(tuple(first), tuple(second))


def grid_overlaps(
    box: Sequence[int], regions: Sequence[BoxBuffer]
) -> Iterator[tuple[Index, list[BoxBuffer]]]:
    """Yield the boxes of a grid over an array that overlap with at least one region.

    Args:
        box: shape of a box of the grid; boxes at the array's end may be smaller.
        regions: boxes of the array that are to be filled.

    Yields:
        Index of the box's first element, and the regions that overlap with the box.
    """
    touching: dict[Index, list[BoxBuffer]] = {}
    for region in regions:
        ranges = (
            range(start // step, -(-(start + size) // step))
            for start, size, step in zip(region.origin, region.values.shape, box, strict=True)
        )
        for index in itertools.product(*ranges):
            touching.setdefault(index, []).append(region)
    for index in sorted(touching):
        yield tuple(i * step for i, step in zip(index, box, strict=True)), touching[index]


def aligned_empty(shapes: Sequence[Index], dtype: np.dtype[Any]) -> list[np.ndarray[Any, Any]]:
    """Return uninitialised arrays in one allocation, each aligned to `ALIGNMENT`."""
    sizes = [math.prod(shape) * dtype.itemsize for shape in shapes]
    steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    memory = _memory(sum(steps) + ALIGNMENT)
    start = -memory.ctypes.data % ALIGNMENT
    arrays = []
    for shape, size, step in zip(shapes, sizes, steps, strict=True):
        arrays.append(memory[start : start + size].view(dtype).reshape(shape))
        start += step
    return arrays


class SmallArrays:
    """Allocator that packs many arrays into one allocation, each aligned to `ALIGNMENT`.

    An allocation lives as long as any of its arrays.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)
        self._next = 0

    def empty(self, shape: Index, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an uninitialised array, aligned to `ALIGNMENT`."""
        size = math.prod(shape) * dtype.itemsize
        if size > _SHARED_BYTES // 16:
            return aligned_empty([shape], dtype)[0]
        if self._next + size > len(self._memory):
            (self._memory,) = aligned_empty([(_SHARED_BYTES,)], np.dtype(np.uint8))
            self._next = 0
        start = self._next
        self._next += -(-size // ALIGNMENT) * ALIGNMENT
        return self._memory[start : start + size].view(dtype).reshape(shape)


def _memory(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return `size` bytes of new memory in ordinary pages, which the kernel assigns on first use.

    NumPy requests huge pages from 4 MiB on. If the kernel must first find them, or get them from a
    virtual machine's host, writing to them takes three times as long as reading the data (ADR
    0011).
    """
    if size < _NUMPY_LARGE_BYTES:
        return np.empty(size, np.uint8)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(pages, np.uint8)
