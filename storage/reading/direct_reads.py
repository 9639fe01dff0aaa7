"""Reads of parts of an array on a local disk into new memory, without TensorStore.

For arrays that `LocalShards` can read this takes half of the processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from cairn.storage.arrays.box_buffers import BoxBuffer, grid_overlaps
from cairn.storage.arrays.boxes import Box
from cairn.storage.errors import StorageError
from cairn.storage.reading.checked_reads import CheckedReads, Index
from cairn.storage.reading.local_shards import LocalShards, StoredCut

__all__ = ["DirectReads"]


class DirectReads:
    """Stored array whose contiguous parts are read from its files, indexed as the array is.

    Args:
        checked: the same array with other reads, for parts that are not contiguous.
        local: the item's files.
        cut: stored layout of the array.
        pool: threads in which reads run.
    """

    def __init__(
        self, checked: CheckedReads, local: LocalShards, cut: StoredCut, pool: ThreadPoolExecutor
    ) -> None:
        self._checked = checked
        self._local = local
        self._cut = cut
        self._pool = pool

    def __getitem__(self, index: Index) -> Any:
        """Return a part to read; `index` has a non-negative integer or bounded slice per axis."""
        parts = [part for part in index if isinstance(part, slice) and part.step in (None, 1)]
        shape = [part.stop - part.start for part in parts]
        # Positions, steps, scalars and empty parts are left to the checked reads.
        if len(parts) < len(index) or min(shape, default=0) <= 0:
            return self._checked[index]
        return _DirectRead(self, [part.start for part in parts], shape)

    def read(self, origin: Sequence[int], shape: Sequence[int]) -> np.ndarray:
        """Return a part of the array, read and checked.

        Raises:
            CorruptionError: stored data is missing or damaged.
        """
        values = np.empty(shape, self._cut.dtype)
        region = BoxBuffer(tuple(origin), values)
        for start, touching in grid_overlaps(self._cut.cut.shard, [region]):
            self._local.read(self._cut, start, touching)
        return values

    def ask(self, box: Box) -> None:
        """Have the disk read a part ahead. Errors are ignored; the read of the part raises them."""
        origin = tuple(part.start for part in box)
        # A region needs an array of the part's shape. Nothing is read into it, so this one takes no
        # memory.
        nothing = np.empty((), self._cut.dtype)
        shape = [part.stop - part.start for part in box]
        region = BoxBuffer(origin, np.broadcast_to(nothing, shape))
        with suppress(StorageError):
            for start, _ in grid_overlaps(self._cut.cut.shard, [region]):
                self._local.ask(self._cut, start, region)

    def submit(self, origin: Sequence[int], shape: Sequence[int]) -> Future[np.ndarray]:
        """Run `read` in another thread, and return its future."""
        return self._pool.submit(self.read, origin, shape)


class _DirectRead:
    """Part of an array; `read` starts to read it and returns the future."""

    def __init__(self, reads: DirectReads, origin: Sequence[int], shape: Sequence[int]) -> None:
        self._reads, self._origin, self._shape = reads, origin, shape

    def read(self, order: str = "C") -> Future[np.ndarray]:
        """Start the read, and return its future; the result is in C order."""
        return self._reads.submit(self._origin, self._shape)
