"""Leaves that several processes hold: each reads a share, and they exchange the shares.

Imports JAX.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from cairn.state.checkpointing.processes import agreement, background, gathering
from cairn.state.checkpointing.processes import holders as holders_processes
from cairn.state.checkpointing.restores.filling import Filling
from cairn.state.checkpointing.restores.host_memory import HostMemory
from cairn.state.checkpointing.restores.read_plan import (
    Part,
    SharedLeaf,
    batch_bytes,
    batches,
    shared_parts,
)
from cairn.state.checkpointing.restores.targets import PlacedLeaf, TargetLeaf
from cairn.storage.arrays.box_buffers import ALIGNMENT, BoxBuffer, aligned_empty
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.leaf_reads import LeafReads
from cairn.storage.reading.remote_shards import Piece

__all__ = ["BATCH_BYTES", "READ_ONCE", "agreed_shared", "read_shared"]

READ_ONCE: Final = "CAIRN_READ_ONCE"
"""Environment variable; "0" makes each process read all that its devices hold."""

BATCH_BYTES: Final = 128 << 20
"""Memory of a process for shared parts, beside the leaves; more if it holds many of them: then a
sixty-fourth of what it holds."""


def agreed_shared(
    infos: Mapping[str, LeafInfo], targets: Mapping[str, TargetLeaf]
) -> dict[str, SharedLeaf]:
    """Return the leaves that several processes hold; none unless all processes agree on them.

    Args:
        infos: description of each stored leaf, by path.
        targets: description of each leaf to make, by path.
    """
    if jax.process_count() == 1:
        return {}
    shared, is_alike = agreement.compare(_shared, infos, targets)
    return shared if is_alike and shared is not None else {}


def _shared(
    infos: Mapping[str, LeafInfo], targets: Mapping[str, TargetLeaf]
) -> dict[str, SharedLeaf] | None:
    """Return the leaves that several processes hold; None if this process reads all itself."""
    if os.environ.get(READ_ONCE) == "0":
        return None
    shared = {}
    for path, target in targets.items():
        info, sharding = infos[path], target.sharding
        if info.chunks is None or sharding is None or sharding.is_fully_addressable:
            continue
        slices = holders_processes.holders_of_slices(sharding, info.shape)
        if any(len(holders) > 1 for holders in slices.values()):
            shape = sharding.shard_shape(info.shape)
            shared[path] = SharedLeaf(path, info.dtype.itemsize, info.chunks, shape, slices)
    return shared


def read_shared(
    arrays: ItemArrays,
    infos: Mapping[str, LeafInfo],
    targets: Mapping[str, TargetLeaf],
    shared: Mapping[str, SharedLeaf],
) -> dict[str, Any]:
    """Read the leaves that several processes hold, each process its share.

    Args:
        arrays: the stored arrays.
        infos: description of each stored leaf, by path.
        targets: description of each leaf to make, by path.
        shared: the leaves to read, equal on all processes.

    Raises:
        CorruptionError, StoreUnavailableError, LateProcessError: on all processes.
    """
    values: dict[str, Any] = {}
    filling: dict[str, Filling] = {}
    memory = HostMemory()
    parts = shared_parts(shared.values())
    last = {part.path: part for part in parts}

    def share(batch: Sequence[Part], streams: Mapping[tuple[int, ...], _Streams]) -> None:
        def gather() -> None:
            for members in sorted(streams):
                if len(members) > 1:
                    gathering.gather_bytes(members, [*streams[members].bytes.values()])

        background.collective(gather, "an exchange of what was read")
        for part in batch:
            leaf_read = filling.get(part.path)
            if leaf_read is None:
                leaf = PlacedLeaf(targets[part.path], infos[part.path])
                while not leaf.fits(memory) and memory.wait():
                    pass
                leaf.take(memory)
                leaf_read = filling[part.path] = Filling(part.path, infos[part.path], leaf, [])
            if part.holders in streams:
                _put(leaf_read.leaf.regions, part, streams[part.holders].parts[part])
            if last[part.path] is part:
                values[part.path] = filling.pop(part.path).make(arrays)

    for batch in batches(parts, batch_bytes(parts, BATCH_BYTES)):
        # A collective has no deadline: enter it only once every process has read its share.
        streams = agreement.all_or_none(_read_streams, arrays, infos, batch)
        agreement.all_or_none(share, batch, streams)
        del streams  # so that no two batches are in memory
    memory.drain()
    return values


class _Streams(NamedTuple):
    """Bytes of a batch that a group of processes exchanges.

    Attributes:
        bytes: of each member, in order.
        parts: the memory of each part within them.
    """

    bytes: dict[int, np.ndarray[Any, Any]]
    parts: dict[Part, np.ndarray[Any, Any]]


def _read_streams(
    arrays: ItemArrays, infos: Mapping[str, LeafInfo], batch: Sequence[Part]
) -> dict[tuple[int, ...], _Streams]:
    """Allocate this process's streams of a batch, by holders, and read its own share."""
    me = int(jax.process_index())
    mine = [part for part in batch if me in part.holders]
    sizes: dict[tuple[int, ...], dict[int, int]] = {}
    starts: dict[Part, int] = {}
    for part in mine:
        size = sizes.setdefault(part.holders, dict.fromkeys(part.holders, 0))
        starts[part] = size[part.reader]
        size[part.reader] += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    streams = {}
    for holders, size in sizes.items():
        memory = aligned_empty([(count,) for count in size.values()], np.dtype(np.uint8))
        streams[holders] = _Streams(dict(zip(size, memory, strict=True)), {})
    tasks: list[Callable[[], None]] = []
    pieces: list[Piece] = []
    arrays.prefetch(dict.fromkeys(infos[part.path].path for part in mine if part.reader == me))
    with LeafReads(arrays) as reads:
        for part, start in starts.items():
            info, stream = infos[part.path], streams[part.holders]
            stored = stream.bytes[part.reader][start : start + part.nbytes]
            stream.parts[part] = stored.view(info.dtype).reshape(part.shape)
            if part.reader == me:
                regions = [BoxBuffer(part.origin, stream.parts[part])]
                near = reads.pieces(info, regions)
                if near is None:
                    tasks += reads.tasks(info, regions)
                else:
                    pieces += near
        _run(reads, pieces, tasks)
    return streams


def _run(reads: LeafReads, pieces: Sequence[Piece], tasks: Sequence[Callable[[], None]]) -> None:
    """Read all pieces and tasks; when this returns or raises, no read runs any more."""
    with ThreadPoolExecutor(reads.threads, "cairn-read") as pool:
        futures = [*(reads.start(pieces) if pieces else ()), *(pool.submit(task) for task in tasks)]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _put(regions: Sequence[BoxBuffer], part: Part, values: np.ndarray[Any, Any]) -> None:
    """Copy a part into its slice."""
    (region,) = (region for region in regions if region.origin == part.within)
    starts = [at - first for at, first in zip(part.origin, part.within, strict=True)]
    box = tuple(slice(at, at + size) for at, size in zip(starts, part.shape, strict=True))
    region.part(box)[...] = values
