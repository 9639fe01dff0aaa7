"""Which process reads what of arrays that several hold: each stored byte once. Pure, without JAX.

Every process makes the same plan of the same shardings, and so none has to tell another of it.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from cairn.storage.arrays import Index

__all__ = ["PART_BYTES", "Part", "SharedLeaf", "batch_bytes", "batches", "shared_parts"]

PART_BYTES: Final = 16 << 20
"""What a process reads at a time, unless a chunk is larger."""


_MOST_BATCHES: Final = 64
"""About so many, if each process holds as much as the others."""


class SharedLeaf(NamedTuple):
    """A leaf of which several processes hold the same.

    Attributes:
        path: of the leaf.
        itemsize: bytes of an element.
        chunks: shape of what can be decoded alone.
        shape: of each slice.
        slices: the processes that hold a slice, in order, by its first element.
    """

    path: str
    itemsize: int
    chunks: Index
    shape: Index
    slices: Mapping[Index, tuple[int, ...]]


class Part(NamedTuple):
    """What one process reads for all that hold it.

    Attributes:
        path: of the leaf.
        within: first element of the slice that it is a part of.
        origin: its own first element in the leaf.
        shape: of it.
        nbytes: of it.
        holders: the processes that hold it, in order.
        reader: the one of them that reads it.
    """

    path: str
    within: Index
    origin: Index
    shape: Index
    nbytes: int
    holders: tuple[int, ...]
    reader: int


def shared_parts(leaves: Iterable[SharedLeaf]) -> list[Part]:
    """All parts, in the order in which they are read; each holder reads about as many bytes."""
    parts: list[Part] = []
    load: dict[tuple[int, ...], dict[int, int]] = {}
    for leaf in leaves:
        columns = []
        for within, holders in sorted(leaf.slices.items()):
            loads = load.setdefault(holders, dict.fromkeys(holders, 0))
            column = []
            for origin, shape in _slabs(leaf, within, len(holders)):
                nbytes = math.prod(shape) * leaf.itemsize
                reader = min(holders, key=lambda one: (loads[one], one))
                loads[reader] += nbytes
                column.append(Part(leaf.path, within, origin, shape, nbytes, holders, reader))
            columns.append(column)
        # Slices take turns: those who hold one do not wait until all of another is read.
        turns = itertools.zip_longest(*columns)
        parts += [part for turn in turns for part in turn if part is not None]
    return parts


def batch_bytes(parts: Sequence[Part], least: int) -> int:
    """What a process may hold of a batch: `least`, or enough that there are not very many batches.

    Before each all processes meet twice, which takes longer the more of them there are.
    """
    count = max((part.holders[-1] for part in parts), default=0) + 1
    held = sum(part.nbytes * len(part.holders) for part in parts) // count
    return max(least, held // _MOST_BATCHES)


def batches(parts: Sequence[Part], limit: int) -> list[list[Part]]:
    """The parts, in order, in batches of which no process holds more than `limit` bytes.

    One part that is larger is a batch by itself for those that hold it.
    """
    count = max((part.holders[-1] for part in parts), default=0) + 1
    held = np.zeros(count, np.int64)
    found: list[list[Part]] = []
    for part in parts:
        holders = list(part.holders)
        if not found or (held[holders].max() + part.nbytes > limit and held[holders].any()):
            found.append([])
            held[:] = 0
        found[-1].append(part)
        held[holders] += part.nbytes
    return found


def _slabs(leaf: SharedLeaf, within: Index, holders: int) -> Iterable[tuple[Index, Index]]:
    """(origin, shape) of stretches of whole chunks, one after the other along one axis."""
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
    count = min(len(span), max(holders, -(-nbytes // PART_BYTES)))
    ends = [span[len(span) * number // count] * chunk for number in range(1, count)]
    first, last = within[axis], within[axis] + leaf.shape[axis]
    for start, stop in itertools.pairwise([first, *ends, last]):
        origin = (*within[:axis], start, *within[axis + 1 :])
        yield origin, (*leaf.shape[:axis], stop - start, *leaf.shape[axis + 1 :])
