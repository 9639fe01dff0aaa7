"""Leaves of which this process reads what its devices hold, straight into place. Imports JAX."""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

from cairn.storage.arrays import SmallArrays
from cairn.storage.reading import HOST_BYTES, ItemArrays, LeafInfo, LeafReads, Piece, WholeChunk
from cairn.storage.training.restoring.targets import PlacedLeaf, TargetLeaf

__all__ = ["Filling", "made", "read_leaves"]

_CHUNKS_AT_ONCE: Final = 512

_GATHERED_BYTES: Final = 64 << 20
"""Of leaves that are looked through for neighbours together."""


class Filling(NamedTuple):
    """A leaf whose parts are being read."""

    path: str
    info: LeafInfo
    leaf: PlacedLeaf
    futures: list[Future[None]]


def read_leaves(
    arrays: ItemArrays, infos: Mapping[str, LeafInfo], wanted: Mapping[str, TargetLeaf]
) -> dict[str, Any]:
    """The leaves by path, placed as the targets say, in the dtypes that they ask for."""
    values: dict[str, Any] = {}
    memory = SmallArrays()
    with ExitStack() as stack:
        arrays.prefetch(infos[path].path for path in wanted)
        reads = stack.enter_context(LeafReads(arrays))
        pool = stack.enter_context(ThreadPoolExecutor(reads.threads, "cairn-read"))
        filling: deque[Filling] = deque()
        stack.callback(lambda: [future.cancel() for one in filling for future in one.futures])
        near = _Near(reads)
        small: list[Filling] = []
        chunks: list[WholeChunk] = []
        waiting = 0
        for path, target in wanted.items():
            info = infos[path]
            if info.chunks is None:
                values[path] = target.empty()
                continue
            leaf = PlacedLeaf(target, info, memory)
            whole = reads.whole_chunks(info, leaf.regions)
            if whole is not None:
                small.append(Filling(path, info, leaf, []))
                chunks += whole
                if len(chunks) >= _CHUNKS_AT_ONCE:
                    _finish_small(reads, arrays, small, chunks, values)
                    small, chunks = [], []
                continue
            found = reads.pieces(info, leaf.regions)
            one = Filling(path, info, leaf, [])
            if found is None:
                one.futures.extend(pool.submit(task) for task in reads.tasks(info, leaf.regions))
            else:
                near.add(one, found)
            filling.append(one)
            waiting += info.nbytes
            while filling and not leaf.stays and waiting > HOST_BYTES:
                near.start()
                waiting -= filling[0].info.nbytes
                _finish(arrays, filling, values)
        _finish_small(reads, arrays, small, chunks, values)
        near.start()
        while filling:
            _finish(arrays, filling, values)
    return values


class _Near:
    """Pieces of some leaves, gathered: of neighbours the store is asked at once."""

    def __init__(self, reads: LeafReads) -> None:
        self._reads = reads
        self._pieces: list[Piece] = []
        self._owners: list[Filling] = []
        self._bytes = 0

    def add(self, leaf: Filling, pieces: list[Piece]) -> None:
        self._pieces += pieces
        self._owners += [leaf] * len(pieces)
        self._bytes += sum(piece.stop - piece.start for piece in pieces)
        if self._bytes >= _GATHERED_BYTES:
            self.start()

    def start(self) -> None:
        """Begin to read them."""
        futures = self._reads.start(self._pieces) if self._pieces else []
        for leaf, future in zip(self._owners, futures, strict=True):
            if not leaf.futures or leaf.futures[-1] is not future:
                leaf.futures.append(future)
        self._pieces, self._owners, self._bytes = [], [], 0


def _finish_small(
    reads: LeafReads,
    arrays: ItemArrays,
    small: list[Filling],
    chunks: list[WholeChunk],
    values: dict[str, Any],
) -> None:
    """Read many small leaves here: to hand them to other threads takes longer."""
    reads.read_whole(chunks)
    for one in small:
        values[one.path] = made(arrays, one)


def _finish(arrays: ItemArrays, filling: deque[Filling], values: dict[str, Any]) -> None:
    """Wait for the first leaf's parts, and make it of them."""
    first = filling[0]
    for future in first.futures:
        future.result()
    filling.popleft()
    values[first.path] = made(arrays, first)


def made(arrays: ItemArrays, one: Filling) -> Any:
    """The leaf, whose parts are filled."""
    form = arrays.form(one.info.path)
    return one.leaf.value(key_impl=form.dtype if form is not None and form.kind == "key" else None)
