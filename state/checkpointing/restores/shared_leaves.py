"""Reads of leaves that several processes hold: each reads a share, and they exchange the shares.

Imports JAX.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from cairn.state.checkpointing.holders import holders_of_slices
from cairn.state.checkpointing.processes import agreement, background, gather
from cairn.state.checkpointing.restores.host_memory import HostMemory
from cairn.state.checkpointing.restores.local_leaves import PendingLeaf
from cairn.state.checkpointing.restores.read_plan import (
    SharedBox,
    SharedLeaf,
    batch_bytes,
    batches,
    shared_boxes,
)
from cairn.state.checkpointing.restores.targets import PlacedLeaf, TargetLeaf
from cairn.storage.arrays.box_buffers import ALIGNMENT, BoxBuffer, aligned_empty
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.leaf_reads import LeafReads

__all__ = ["BATCH_BYTES", "READ_ONCE", "agreed_shared", "read_shared"]

READ_ONCE: Final = "CAIRN_READ_ONCE"
"""Environment variable; "0" makes each process read all that its devices hold."""

BATCH_BYTES: Final = 128 << 20
"""Bytes of host memory per process for the shared boxes of a batch, beside the leaves. A process
that holds more than 64 times this needs a sixty-fourth of its bytes."""


def agreed_shared(
    infos: Mapping[str, LeafInfo], targets: Mapping[str, TargetLeaf]
) -> dict[str, SharedLeaf]:
    """Return the leaves that several processes hold, by path. All processes must call this.

    Empty if the processes do not all find the same leaves, or if `READ_ONCE` is "0" on one.

    Args:
        infos: description of each stored leaf, by path.
        targets: description of each leaf to return, by path.
    """
    if jax.process_count() == 1:
        return {}
    shared, is_alike = agreement.compare(_shared, infos, targets)
    return shared if is_alike and shared is not None else {}


def _shared(
    infos: Mapping[str, LeafInfo], targets: Mapping[str, TargetLeaf]
) -> dict[str, SharedLeaf] | None:
    """Return the leaves that several processes hold, by path; None if `READ_ONCE` is "0"."""
    if os.environ.get(READ_ONCE) == "0":
        return None
    shared = {}
    for path, target in targets.items():
        info, sharding = infos[path], target.sharding
        if info.chunks is None or sharding is None or sharding.is_fully_addressable:
            continue
        slices = holders_of_slices(sharding, info.shape)
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
    """Read the leaves that several processes hold, and return them by path.

    All processes must call this: each reads its share and sends it to the others.

    Args:
        arrays: the stored arrays.
        infos: description of each stored leaf, by path.
        targets: description of each leaf to return, by path.
        shared: the leaves to read, equal on all processes.

    Raises:
        CorruptionError: stored bytes fail their checksum, on any process.
        StoreUnavailableError: the store does not respond to a process.
        LateProcessError: a process did not take part in time.
    """
    values: dict[str, Any] = {}
    pending: dict[str, PendingLeaf] = {}
    memory = HostMemory()
    boxes = shared_boxes(shared.values())
    last = {box.path: box for box in boxes}

    def share(batch: Sequence[SharedBox], streams: Mapping[tuple[int, ...], _Streams]) -> None:
        def exchange_streams() -> None:
            for members in sorted(streams):
                if len(members) > 1:
                    gather.gather_bytes(members, [*streams[members].bytes.values()])

        background.collective(exchange_streams, "an exchange of what was read")
        for box in batch:
            pending_leaf = pending.get(box.path)
            if pending_leaf is None:
                leaf = PlacedLeaf(targets[box.path], infos[box.path])
                while not leaf.fits(memory) and memory.wait():
                    pass
                leaf.take(memory)
                pending_leaf = pending[box.path] = PendingLeaf(box.path, infos[box.path], leaf, [])
            if box.holders in streams:
                _put(pending_leaf.leaf.regions, box, streams[box.holders].boxes[box])
            if last[box.path] is box:
                values[box.path] = pending.pop(box.path).make(arrays)

    for batch in batches(boxes, batch_bytes(boxes, BATCH_BYTES)):
        # Processes enter the collective only once all have read their shares: a late one would
        # make it fail.
        streams = agreement.all_or_none(_read_streams, arrays, infos, batch)
        agreement.all_or_none(share, batch, streams)
        del streams  # so that one batch is in memory at a time
    memory.drain()
    return values


class _Streams(NamedTuple):
    """Buffers for the bytes of a batch that the holders of its boxes exchange.

    Attributes:
        bytes: for each holder, in order, the buffer for the bytes that it reads.
        boxes: each box's array, a view of these buffers.
    """

    bytes: dict[int, np.ndarray[Any, Any]]
    boxes: dict[SharedBox, np.ndarray[Any, Any]]


def _read_streams(
    arrays: ItemArrays, infos: Mapping[str, LeafInfo], batch: Sequence[SharedBox]
) -> dict[tuple[int, ...], _Streams]:
    """Return this process's buffers for a batch, by holders, with its own share read."""
    me = int(jax.process_index())
    mine = [box for box in batch if me in box.holders]
    sizes: dict[tuple[int, ...], dict[int, int]] = {}
    starts: dict[SharedBox, int] = {}
    for box in mine:
        size = sizes.setdefault(box.holders, dict.fromkeys(box.holders, 0))
        starts[box] = size[box.reader]
        size[box.reader] += -(-box.nbytes // ALIGNMENT) * ALIGNMENT
    streams = {}
    for holders, size in sizes.items():
        memory = aligned_empty([(count,) for count in size.values()], np.dtype(np.uint8))
        streams[holders] = _Streams(dict(zip(size, memory, strict=True)), {})
    requests: list[tuple[LeafInfo, list[BoxBuffer]]] = []
    arrays.prefetch(dict.fromkeys(infos[box.path].path for box in mine if box.reader == me))
    with LeafReads(arrays) as reads:
        for box, start in starts.items():
            info, stream = infos[box.path], streams[box.holders]
            stored = stream.bytes[box.reader][start : start + box.nbytes]
            stream.boxes[box] = stored.view(info.dtype).reshape(box.shape)
            if box.reader == me:
                requests.append((info, [BoxBuffer(box.origin, stream.boxes[box])]))
        reads.fill(requests)
    return streams


def _put(regions: Sequence[BoxBuffer], box: SharedBox, values: np.ndarray[Any, Any]) -> None:
    """Copy a box's values into the one of `regions` that is the slice which contains it."""
    (region,) = (region for region in regions if region.origin == box.within)
    starts = [at - first for at, first in zip(box.origin, box.within, strict=True)]
    within = tuple(slice(at, at + size) for at, size in zip(starts, box.shape, strict=True))
    region.part(within)[...] = values
