"""Parallel reads of parts of a stored item's leaves; each stored byte is read once."""

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import numpy as np

from cairn.storage.arrays.box_buffers import BoxBuffer, Index, grid_overlaps, overlap
from cairn.storage.errors import translate_error
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.local_shards import LocalShards, StoredCut, WholeChunk
from cairn.storage.reading.remote_shards import Piece, RangeReads, shard_pieces

__all__ = ["HOST_BYTES", "MOST_LOCAL_THREADS", "REMOTE_THREADS", "LeafReads", "WholeChunk"]

MOST_LOCAL_THREADS = 16
_LOCAL_THREADS = max(4, min(MOST_LOCAL_THREADS, os.cpu_count() or 2))
"""Number of threads for a local disk: as many parts are read at once past the page cache."""
REMOTE_THREADS = 8
"""Number of threads for an object store.

Each thread holds a part of an outer shard: at most 64 MiB unless plain Orbax wrote it.
"""

HOST_BYTES = 1 << 29
"""Most bytes of leaves on the host on their way to devices other than CPUs."""

_SMALL_BYTES = 64 << 10
"""Size in bytes up to which a chunk costs more to schedule than to read."""


class LeafReads:
    """Reads of one item. Must be closed.

    Attributes:
        threads: number of tasks to run at the same time.
    """

    def __init__(self, arrays: ItemArrays) -> None:
        """Create the reads of an item's arrays."""
        self._arrays = arrays
        self._local = LocalShards(arrays.uri) if arrays.uri.scheme == "file" else None
        self._ranges = None if self._local else RangeReads(arrays.uri)
        self.threads = _LOCAL_THREADS if self._local else REMOTE_THREADS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ranges is not None:
            self._ranges.close()

    def fill(self, requests: Iterable[tuple[LeafInfo, Sequence[BoxBuffer]]]) -> None:
        """Fill regions of leaves; when this returns or raises, no read runs any more.

        Args:
            requests: leaves, each with parts of it, of its dtype.

        Raises:
            CorruptionError: stored data is missing or damaged.
            StoreUnavailableError: the store gives no answer.
        """
        tasks: list[Callable[[], None]] = []
        pieces: list[Piece] = []
        for info, regions in requests:
            near = self.pieces(info, regions)
            if near is None:
                tasks += self.tasks(info, regions)
            else:
                pieces += near
        with ThreadPoolExecutor(self.threads, "cairn-read") as pool:
            futures = [*(self.start(pieces) if pieces else ()), *map(pool.submit, tasks)]
            try:
                for future in futures:
                    future.result()
            finally:
                for future in futures:
                    future.cancel()

    def pieces(self, info: LeafInfo, regions: Sequence[BoxBuffer]) -> list[Piece] | None:
        """Return the pieces whose reads fill the regions, for uncompressed values in a bucket.

        Pass the pieces of many leaves to `start` together, so that neighbours are read in one
        request. Returns None for other leaves, for which to use `tasks`.

        Args:
            info: the leaf.
            regions: parts of the leaf, of its dtype.

        Raises:
            CorruptionError: the step's index lacks their locations.
        """
        cut = None if self._ranges is None else self._arrays.stored_cut(info.path)
        if cut is None or cut.place is None:
            return None
        pieces: list[Piece] = []
        for origin, touching in grid_overlaps(cut.cut.shard, regions):
            stored = [
                BoxBuffer(region.origin, region.values.view(cut.dtype)) for region in touching
            ]
            pieces += shard_pieces(cut, origin, stored)
        return pieces

    def start(self, pieces: Sequence[Piece]) -> list[Future[None]]:
        """Begin to read pieces; return a future for each, which raises what a task raises."""
        assert self._ranges is not None
        return self._ranges.start(pieces)

    def tasks(self, info: LeafInfo, regions: Sequence[BoxBuffer]) -> Iterator[Callable[[], None]]:
        """Yield functions that fill all regions with checked values, in any order and any threads.

        A task raises CorruptionError if stored data is missing or damaged, and
        StoreUnavailableError if the store gives no answer.

        Args:
            info: the leaf.
            regions: parts of the leaf, of its dtype.
        """
        cut = self._arrays.stored_cut(info.path)
        if self._local is not None and cut is not None:
            for origin, touching in grid_overlaps(cut.cut.shard, regions):
                yield _local_task(self._local, cut, origin, touching)
            return
        box = self._arrays.read_box(info)
        for origin, touching in grid_overlaps(box, regions):
            yield self._task(info, origin, box, touching)

    def whole_chunks(self, info: LeafInfo, regions: Sequence[BoxBuffer]) -> list[WholeChunk] | None:
        """Return the chunks whose reads fill the regions, if each is a small chunk on a disk.

        Pass the chunks of many leaves to `read_whole` together: one by one they cost more to
        schedule than to read. Returns None for other leaves, for which to use `tasks`.

        Args:
            info: the leaf.
            regions: parts of the leaf, of its dtype.
        """
        if self._local is None or info.nbytes > _SMALL_BYTES * len(regions):
            return None
        cut = self._arrays.stored_cut(info.path)
        if cut is None or cut.cut.shard != cut.cut.chunk:
            return None
        chunks = []
        for origin, values in regions:
            if values.shape != cut.cut.chunk or any(map(operator.mod, origin, values.shape)):
                return None
            stored = values if values.dtype == cut.dtype else values.view(cut.dtype)
            chunks.append(WholeChunk(cut, BoxBuffer(origin, stored)))
        return chunks

    def read_whole(self, chunks: Sequence[WholeChunk]) -> None:
        """Fill the regions of chunks from `whole_chunks`, of any leaves.

        Raises:
            CorruptionError: stored data is missing or damaged.
            StoreUnavailableError: the store gives no answer.
        """
        try:
            if self._local is not None:
                self._local.read_whole(chunks)
        except OSError as exc:
            raise translate_error(exc, path=self._arrays.uri) from exc

    def _task(
        self, info: LeafInfo, origin: Index, box: Sequence[int], regions: list[BoxBuffer]
    ) -> Callable[[], None]:
        shape = tuple(min(a, n - o) for a, n, o in zip(box, info.shape, origin, strict=True))

        def run() -> None:
            shared = [
                common
                for region in regions
                if (common := overlap(origin, shape, region.origin, region.values.shape))
            ]
            # Read only the bounding box of the regions within the shard.
            low = [
                min(overlapping.first[axis].start for overlapping in shared)
                for axis in range(len(shape))
            ]
            high = [
                max(overlapping.first[axis].stop for overlapping in shared)
                for axis in range(len(shape))
            ]
            at = tuple(o + a for o, a in zip(origin, low, strict=True))
            part = tuple(slice(o + a, o + b) for o, a, b in zip(origin, low, high, strict=True))
            reads: Any = self._arrays.array(info.path)[part]
            values: np.ndarray[Any, Any] = self._arrays.wait(reads.read(order="C"), info.path)
            for region in regions:
                common = overlap(at, values.shape, region.origin, region.values.shape)
                if common is not None:
                    region.part(common.second)[...] = values[common.first]

        return run


def _local_task(
    local: LocalShards, cut: StoredCut, origin: Index, regions: list[BoxBuffer]
) -> Callable[[], None]:
    stored = [BoxBuffer(region.origin, region.values.view(cut.dtype)) for region in regions]

    def run() -> None:
        try:
            local.read(cut, origin, stored)
        except OSError as exc:
            raise translate_error(exc, path=cut.where) from exc

    return run
