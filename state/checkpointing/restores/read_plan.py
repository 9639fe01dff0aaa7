"""Plan of which process reads which part of arrays that several processes hold. Pure.

Each stored byte is read by one process. Every process computes the same plan from the shardings, so
they need not exchange it.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from cairn.storage.arrays.box_buffers import Index

__all__ = ["BOX_BYTES", "SharedBox", "SharedLeaf", "batch_bytes", "batches", "shared_boxes"]

BOX_BYTES: Final = 16 << 20
"""Approximate maximum bytes of a box, unless a chunk is larger."""


_MAX_BATCHES: Final = 64
"""Approximate maximum number of batches, if all processes hold equally many bytes."""


class SharedLeaf(NamedTuple):
    """Leaf with slices that several processes hold.

    Attributes:
        path: the leaf's path.
        itemsize: bytes of an element.
        chunks: shape of the smallest box that can be decoded alone.
        shape: shape of each slice.
        slices: the sorted processes that hold each slice, by the index of its first element.
    """

    path: str
    itemsize: int
    chunks: Index
    shape: Index
    slices: Mapping[Index, tuple[int, ...]]


class SharedBox(NamedTuple):
    """Box of a leaf that one process reads for all processes that hold it.

    Attributes:
        path: the leaf's path.
        within: index in the leaf of the first element of the slice that contains the box.
        origin: index in the leaf of the box's first element.
        shape: the box's shape.
        nbytes: the box's bytes.
        holders: the processes that hold the box, in order.
        reader: the process among the holders that reads it.
    """

    path: str
    within: Index
    origin: Index
    shape: Index
    nbytes: int
    holders: tuple[int, ...]
    reader: int


def shared_boxes(leaves: Iterable[SharedLeaf]) -> list[SharedBox]:
    """Divide leaves into boxes, in the order of reading.

    The processes that hold the same slice read about equally many bytes of it.
    """
    boxes: list[SharedBox] = []
    load: dict[tuple[int, ...], dict[int, int]] = {}
    for leaf in leaves:
        columns = []
        for within, holders in sorted(leaf.slices.items()):
            loads = load.setdefault(holders, dict.fromkeys(holders, 0))
            column = []
            for origin, shape in _slabs(leaf, within, len(holders)):
                nbytes = math.prod(shape) * leaf.itemsize
                reader = min(holders, key=lambda holder: (loads[holder], holder))
                loads[reader] += nbytes
                column.append(SharedBox(leaf.path, within, origin, shape, nbytes, holders, reader))
            columns.append(column)
        # Boxes of the slices alternate, so that the holders of all slices read at the same time.
        turns = itertools.zip_longest(*columns)
        boxes += [box for turn in turns for box in turn if box is not None]
    return boxes


def batch_bytes(boxes: Sequence[SharedBox], least: int) -> int:
    """Return the bytes per batch and process: `least`, or more to limit the number of batches.

    All processes exchange messages twice per batch, which takes longer in larger jobs.
    """
    count = max((box.holders[-1] for box in boxes), default=0) + 1
    nbytes = sum(box.nbytes * len(box.holders) for box in boxes) // count
    return max(least, nbytes // _MAX_BATCHES)


def batches(boxes: Sequence[SharedBox], limit: int) -> list[list[SharedBox]]:
    """Group the boxes, in order, into batches of at most `limit` bytes in any process.

    A box that is larger is the only one of its holders in its batch.
    """
    count = max((box.holders[-1] for box in boxes), default=0) + 1
    nbytes = np.zeros(count, np.int64)
    grouped: list[list[SharedBox]] = []
    for box in boxes:
        holders = list(box.holders)
        if not grouped or (nbytes[holders].max() + box.nbytes > limit and nbytes[holders].any()):
            grouped.append([])
            nbytes[:] = 0
        grouped[-1].append(box)
        nbytes[holders] += box.nbytes
    return grouped


def _slabs(leaf: SharedLeaf, within: Index, holders: int) -> Iterable[tuple[Index, Index]]:
    """Divide a slice along its first axis with several chunks; yield (origin, shape) of each box.

    Boxes end at the bounds of chunks.

    Args:
        leaf: the leaf.
        within: index of the slice's first element.
        holders: number of processes that hold the slice; the minimum number of boxes, if there are
            as many chunks.
    """
    spans = [
        range(start // chunk, -(-(start + size) // chunk))
        for start, size, chunk in zip(within, leaf.shape, leaf.chunks, strict=True)
    ]
    axis = next((axis for axis, span in enumerate(spans) if len(span) > 1), None)
    if axis is None:
        yield within, leaf.shape
        return
    span, chunk = spans[axis], leaf.chunks[axis]
    nbytes = math.prod(leaf.shape) * leaf.itemsize
    count = min(len(span), max(holders, -(-nbytes // BOX_BYTES)))
    ends = [span[len(span) * number // count] * chunk for number in range(1, count)]
    first, last = within[axis], within[axis] + leaf.shape[axis]
    for start, stop in itertools.pairwise([first, *ends, last]):
        origin = (*within[:axis], start, *within[axis + 1 :])
        yield origin, (*leaf.shape[:axis], stop - start, *leaf.shape[axis + 1 :])
