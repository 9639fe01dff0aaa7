"""Fill parts of leaves from a stored item, in parallel, each stored byte read once. No JAX."""

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Self

import numpy as np

from cairn.storage.arrays import Index, Region, boxes_touching, overlap
from cairn.storage.errors import translate
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.local_shards import LocalShards, StoredCut, WholeChunk
from cairn.storage.reading.remote_shards import Piece, RangeReads, shard_pieces

__all__ = ["HOST_BYTES", "MOST_LOCAL_THREADS", "REMOTE_THREADS", "LeafReads", "WholeChunk"]

MOST_LOCAL_THREADS = 16
_LOCAL_THREADS = max(4, min(MOST_LOCAL_THREADS, os.cpu_count() or 2))
"""A disk that is read past the page cache is asked for as many parts at a time."""
REMOTE_THREADS = 8
"""Each holds what it reads of an outer shard, at most 64 MiB unless plain Orbax wrote it."""

HOST_BYTES = 1 << 29
"""Of the window on the host through which leaves pass to devices other than CPUs."""

_SMALL_BYTES = 64 << 10
"""Chunks up to this size take longer to look after than to read."""


class LeafReads:
    """Reads of one item. To be closed.

    Attributes:
        threads: how many tasks to run at a time.
    """

    def __init__(self, arrays: ItemArrays) -> None:
        """Of the item's arrays."""
        self._arrays = arrays
        self._local = LocalShards(arrays.uri) if arrays.uri.scheme == "file" else None
        self._ranges = None if self._local else RangeReads(arrays.uri)
        self.threads = _LOCAL_THREADS if self._local else REMOTE_THREADS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ranges is not None:
            self._ranges.close()

    def pieces(self, info: LeafInfo, regions: Sequence[Region]) -> list[Piece] | None:
        """What there is to read to fill the regions, if it lies in an object store as values do.

        Many of these, of any leaves, are to be given to `start` together: what lies side by side is
        asked for at once. None: it is for `tasks`.

        Args:
            info: the leaf.
            regions: parts of it, of its dtype.

        Raises:
            CorruptionError: the step's index does not tell where they lie.
        """
        cut = None if self._ranges is None else self._arrays.stored_cut(info.path)
        if cut is None or cut.place is None:
            return None
        found: list[Piece] = []
        for origin, touching in boxes_touching(info.shape, cut.cut.shard, regions):
            stored = [Region(region.origin, region.values.view(cut.dtype)) for region in touching]
            found += shard_pieces(cut, origin, stored)
        return found

    def start(self, pieces: Sequence[Piece]) -> list[Future[None]]:
        """Begin to read pieces; what to wait for, of each. It raises what a task raises."""
        assert self._ranges is not None
        return self._ranges.start(pieces)

    def tasks(self, info: LeafInfo, regions: Sequence[Region]) -> Iterator[Callable[[], None]]:
        """What to run, in any order and in any threads, to fill all regions with checked values.

        A task raises CorruptionError if stored data is missing or damaged, and
        StoreUnavailableError if the store gives no answer.

        Args:
            info: the leaf.
            regions: parts of it, of its dtype.
        """
        cut = self._arrays.stored_cut(info.path)
        if self._local is not None and cut is not None:
            for origin, touching in boxes_touching(info.shape, cut.cut.shard, regions):
                yield _local_task(self._local, cut, origin, touching)
            return
        box = self._arrays.read_box(info)
        for origin, touching in boxes_touching(info.shape, box, regions):
            yield self._task(info, origin, box, touching)

    def whole_chunks(self, info: LeafInfo, regions: Sequence[Region]) -> list[WholeChunk] | None:
        """What there is to read to fill the regions, if each is a small chunk that lies on a disk.

        Many of these are read together by `read_whole`: one by one they cost more to look after
        than to read. All else is for `tasks`.

        Args:
            info: the leaf.
            regions: parts of it, of its dtype.
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
            chunks.append(WholeChunk(cut, Region(origin, stored)))
        return chunks

    def read_whole(self, chunks: Sequence[WholeChunk]) -> None:
        """Fill the regions of chunks that `whole_chunks` gave, of any leaves.

        Raises:
            CorruptionError: stored data is missing or damaged.
            StoreUnavailableError: the store gives no answer.
        """
        try:
            if self._local is not None:
                self._local.read_whole(chunks)
        except OSError as exc:
            raise translate(exc, path=self._arrays.uri) from exc

    def _task(
        self, info: LeafInfo, origin: Index, box: Sequence[int], regions: list[Region]
    ) -> Callable[[], None]:
        shape = tuple(min(a, n - o) for a, n, o in zip(box, info.shape, origin, strict=True))

        def run() -> None:
            shared = [
                found
                for region in regions
                if (found := overlap(origin, shape, region.origin, region.values.shape))
            ]
            low = [min(one.first[axis].start for one in shared) for axis in range(len(shape))]
            high = [max(one.first[axis].stop for one in shared) for axis in range(len(shape))]
            at = tuple(o + a for o, a in zip(origin, low, strict=True))
            part = tuple(slice(o + a, o + b) for o, a, b in zip(origin, low, high, strict=True))
            reads: Any = self._arrays.array(info.path)[part]
            values: np.ndarray[Any, Any] = self._arrays.wait(reads.read(order="C"), info.path)
            for region in regions:
                found = overlap(at, values.shape, region.origin, region.values.shape)
                if found is not None:
                    region.part(found.second)[...] = values[found.first]

        return run


def _local_task(
    local: LocalShards, cut: StoredCut, origin: Index, regions: list[Region]
) -> Callable[[], None]:
    stored = [Region(region.origin, region.values.view(cut.dtype)) for region in regions]

    def run() -> None:
        try:
            local.read(cut, origin, stored)
        except OSError as exc:
            raise translate(exc, path=cut.where) from exc

    return run
