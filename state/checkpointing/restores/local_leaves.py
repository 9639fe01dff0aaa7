"""Reads of the parts of leaves that this process's devices hold. Imports JAX."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from cairn.state.checkpointing.restores.host_memory import HostMemory
from cairn.state.checkpointing.restores.targets import PlacedLeaf, TargetLeaf
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.leaf_reads import LeafReads, WholeChunk
from cairn.storage.reading.remote_shards import Piece

__all__ = ["PendingLeaf", "read_leaves"]

_CHUNKS_AT_ONCE: Final = 512

_GATHERED_BYTES: Final = 64 << 20
"""Bytes of pieces to gather before reading them, so that adjacent ones can share a request."""


class PendingLeaf(NamedTuple):
    """Leaf that is being read; its `futures` end when its parts are filled."""

    path: str
    info: LeafInfo
    leaf: PlacedLeaf
    futures: list[Future[None]]

    def make(self, arrays: ItemArrays) -> Any:
        """Return the leaf, once all of its parts are filled."""
        form = arrays.form(self.info.path)
        return self.leaf.value(
            key_impl=form.dtype if form and form.kind == "key" else None,
            where=arrays.where(self.info.path),
        )


def read_leaves(
    arrays: ItemArrays, infos: Mapping[str, LeafInfo], targets: Mapping[str, TargetLeaf]
) -> dict[str, Any]:
    """Read the targets' leaves; return them by path, with the targets' shardings and dtypes.

    Leaves for devices other than CPUs pass through a window of host memory of limited size.

    Args:
        arrays: the stored arrays.
        infos: description of each stored leaf, by path.
        targets: description of each leaf to return, by path.
    """
    with ExitStack() as stack:
        arrays.prefetch(infos[path].path for path in targets)
        reads = stack.enter_context(LeafReads(arrays))
        pool = stack.enter_context(ThreadPoolExecutor(reads.threads, "cairn-read"))
        reading = _Reading(arrays, reads, pool)
        stack.callback(reading.cancel)
        for path, target in targets.items():
            if infos[path].chunks is None:
                reading.values[path] = target.empty()
            else:
                reading.add(path, infos[path], target)
        reading.finish()
        return reading.values


class _Reading:
    """Reads of leaves that are under way.

    Attributes:
        values: leaves that are complete, by path.
    """

    def __init__(self, arrays: ItemArrays, reads: LeafReads, pool: ThreadPoolExecutor) -> None:
        self.values: dict[str, Any] = {}
        self._arrays, self._reads, self._pool = arrays, reads, pool
        self._memory = HostMemory()
        self._gathered = _GatheredPieces(reads)
        self._small: list[PendingLeaf] = []
        self._chunks: list[WholeChunk] = []
        self._pending: deque[PendingLeaf] = deque()

    def add(self, path: str, info: LeafInfo, target: TargetLeaf) -> None:
        """Start to read a leaf, after waiting for room in host memory."""
        leaf = PlacedLeaf(target, info)
        while not leaf.fits(self._memory):
            if not self._memory.wait():
                self._finish_some()
        regions = leaf.take(self._memory).regions
        pending = PendingLeaf(path, info, leaf, [])
        if (whole := self._reads.whole_chunks(info, regions)) is not None:
            self._small.append(pending)
            self._chunks += whole
            if len(self._chunks) >= _CHUNKS_AT_ONCE:
                self._finish_small()
            return
        if (pieces := self._reads.pieces(info, regions)) is not None:
            self._gathered.add(pending, pieces)
        else:
            pending.futures.extend(map(self._pool.submit, self._reads.tasks(info, regions)))
        self._pending.append(pending)

    def finish(self) -> None:
        """Complete all added leaves, and wait until they are on their devices."""
        while self._small or self._pending:
            self._finish_some()
        self._memory.drain()

    def cancel(self) -> None:
        """Cancel the reads that have not started."""
        for pending in self._pending:
            for future in pending.futures:
                future.cancel()

    def _finish_some(self) -> None:
        """Complete the small leaves; if there are none, the first of the other leaves."""
        self._gathered.start()
        if self._small:
            self._finish_small()
            return
        for future in self._pending[0].futures:
            future.result()
        first = self._pending.popleft()
        self.values[first.path] = first.make(self._arrays)

    def _finish_small(self) -> None:
        """Read the small leaves in this thread; passing them to other threads would take longer."""
        self._reads.read_whole(self._chunks)
        for pending in self._small:
            self.values[pending.path] = pending.make(self._arrays)
        self._small, self._chunks = [], []


class _GatheredPieces:
    """Pieces of several leaves, gathered so that pieces adjacent in a file share a request."""

    def __init__(self, reads: LeafReads) -> None:
        self._reads = reads
        self._pieces: list[Piece] = []
        self._owners: list[PendingLeaf] = []
        self._bytes = 0

    def add(self, leaf: PendingLeaf, pieces: list[Piece]) -> None:
        self._pieces += pieces
        self._owners += [leaf] * len(pieces)
        self._bytes += sum(piece.stop - piece.start for piece in pieces)
        if self._bytes >= _GATHERED_BYTES:
            self.start()

    def start(self) -> None:
        """Start to read the gathered pieces."""
        futures = self._reads.start(self._pieces) if self._pieces else []
        for leaf, future in zip(self._owners, futures, strict=True):
            if not leaf.futures or leaf.futures[-1] is not future:
                leaf.futures.append(future)
        self._pieces, self._owners, self._bytes = [], [], 0
