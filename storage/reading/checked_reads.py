"""Reads of a stored array that compare the digest of each chunk they touch.

Chunks are read whole; no part of a chunk is returned before its digest was compared.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from cairn.storage.arrays.boxes import READ_BYTES, Box, chunk_boxes, copy_permuted
from cairn.storage.arrays.digests import digest_chunks

__all__ = ["CheckedReads"]

_PIECES_AHEAD = 2

Index = tuple[int | slice, ...]


class CheckedReads:
    """Stored array whose chunks are checked as they are read, indexed as the array is."""

    def __init__(
        self,
        array: Any,
        shape: Sequence[int],
        chunks: Sequence[int],
        itemsize: int,
        check: Callable[[tuple[int, ...], int], None],
    ) -> None:
        """Wrap a TensorStore array, or an object with the same reads.

        Args:
            array: the stored array.
            shape: shape of the array.
            chunks: shape of a chunk, no size 0.
            itemsize: bytes per element.
            check: called with a chunk's index in the grid of chunks and its digest; raises if the
                digest is not the saved one.
        """
        self.array, self.shape, self.chunks = array, tuple(shape), tuple(chunks)
        self.limit = READ_BYTES // itemsize
        self._check = check

    def __getitem__(self, index: Index) -> _CheckedRead:
        """Return a part to read; `index` has a non-negative integer or bounded slice per axis."""
        return _CheckedRead(self, index)

    def rounded(self, box: Box) -> Box:
        """Return the box grown to whole chunks."""
        return tuple(
            slice(part.start // chunk * chunk, min(size, -(-part.stop // chunk) * chunk))
            for part, chunk, size in zip(box, self.chunks, self.shape, strict=True)
        )

    def check(self, values: np.ndarray, box: Box) -> None:
        """Raise an error if a chunk's digest is not the saved one; `box` has whole chunks."""
        digest = digest_chunks(values, [part.start for part in box], self.chunks)
        first = [part.start // chunk for part, chunk in zip(box, self.chunks, strict=True)]
        for index in itertools.product(*map(range, digest.shape)):
            at = tuple(a + b for a, b in zip(first, index, strict=True))
            self._check(at, int(digest[index]))


class _CheckedRead:
    """Part of a checked array; `read` starts to read it, and `result` waits for it.

    A part of whole chunks is one read. Any other part is assembled from pieces of whole chunks,
    read a few ahead: besides the part this takes three pieces of at most `READ_BYTES` or one chunk
    each.
    """

    def __init__(self, reads: CheckedReads, index: Index) -> None:
        self._reads, self._index = reads, index
        parts = [slice(axis, axis + 1) if isinstance(axis, int) else axis for axis in index]
        self._wanted = [range(part.start, part.stop, part.step or 1) for part in parts]
        self._shape = tuple(len(axis) for axis in self._wanted)
        # Smallest box around the part; positions that a step skips are cut out of it later.
        box = tuple(slice(axis[0], axis[-1] + 1) if axis else slice(0, 0) for axis in self._wanted)
        is_whole_chunks = tuple(part.stop - part.start for part in box) == self._shape
        self._one_read = is_whole_chunks and reads.rounded(box) == box
        cut = chunk_boxes(box, reads.chunks, reads.limit)
        # With steps, some chunks have no wanted element: they are not read.
        pieces = (piece for piece in cut if all(map(_shared, self._wanted, piece)))
        self._todo: Iterator[Box] = iter((box,)) if self._one_read else pieces
        self._ahead: deque[tuple[Box, Any]] = deque()

    def read(self, order: str = "C") -> _CheckedRead:
        """Start the read, and return this part; the result is in C order."""
        for piece in itertools.islice(self._todo, _PIECES_AHEAD):
            self._start(piece)
        return self

    def result(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Return the part, once it is read and checked."""
        if 0 in self._shape:
            values: np.ndarray = self._reads.array[self._index].read(order="C").result()
            return values
        part: Any = None
        while self._ahead:
            box, future = self._ahead.popleft()
            # Start the next read before waiting for this one.
            if (following := next(self._todo, None)) is not None:
                self._start(following)
            values = np.asarray(future.result())
            del future
            self._reads.check(values, box)
            if self._one_read:
                part = values
                continue
            if part is None:
                part = np.empty(self._shape, values.dtype)
            shared = [pair for pair in map(_shared, self._wanted, box) if pair]
            inside, outside = (tuple(cuts) for cuts in zip(*shared, strict=True))
            copy_permuted(values[inside], range(values.ndim), part[outside])
        axes = zip(self._shape, self._index, strict=True)
        result: np.ndarray = part.reshape([n for n, axis in axes if not isinstance(axis, int)])
        return result

    def _start(self, piece: Box) -> None:
        box = self._reads.rounded(piece)
        self._ahead.append((box, self._reads.array[box].read(order="C")))


def _shared(requested: range, cut: slice) -> tuple[slice, slice] | None:
    """Return the common positions as (slice within `cut`, within `requested`); None if empty."""
    first = max(0, -(-(cut.start - requested.start) // requested.step))
    stop = min(len(requested), -(-(cut.stop - requested.start) // requested.step))
    if first >= stop:
        return None
    begin, end = requested[first] - cut.start, requested[stop - 1] - cut.start + 1
    return slice(begin, end, requested.step), slice(first, stop)
