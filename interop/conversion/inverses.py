"""Inverses of operations, and operations on several groups of tensors alike.

A table that makes leaves of tensors also makes the tensors of the leaves. An inverse reads boxes
like every operation, so that the way back is as cheap as the way forth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from cairn.interop.conversion.boxes import Box, BoxReads, box_shape, shifted
from cairn.interop.conversion.layout_ops import Merge, Pad, Permute, Unstack
from cairn.interop.conversion.ops import (
    Array,
    Chain,
    Op,
    Rename,
    RotaryRows,
    Shape,
    Split,
    Stack,
    Transpose,
    of_rows,
)
from cairn.interop.conversion.value_ops import Plus, Times

__all__ = ["Each", "Inverse", "inverse"]

_T = TypeVar("_T")


def inverse(op: Op) -> Op:
    """Return the operation that undoes another one."""
    match op:
        case Rename() | Transpose():
            return op
        case Stack():
            return Unstack(op.count, op.axis)
        case Unstack():
            return Stack(op.count, op.axis)
        case Permute():
            return Permute(op.back)
        case Chain():
            return Chain(tuple(inverse(step) for step in reversed(op.ops)))
        case Each():
            return Each(inverse(op.op), op.groups)
        case Inverse():
            return op.op
        case _:
            return Inverse(op)


@dataclass(frozen=True)
class Inverse(Op):
    """An operation the other way round: it makes tensors of leaves.

    A box of a joined, reshaped, reordered, padded, scaled or shifted tensor needs only boxes of the
    leaves. For other operations it needs all leaves whole.
    """

    op: Op

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return what the operation's `to_hf` returns."""
        return self.op.to_hf(tensors)

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return what the operation's `from_hf` returns."""
        return self.op.from_hf(leaves)

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the operation's `tensor_shapes`."""
        return self.op.tensor_shapes(shapes)

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the operation's `leaf_shapes`."""
        return self.op.leaf_shapes(shapes)

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the boxes that make up a box; all tensors whole if there is no better way."""
        match self.op:
            case Split():
                return _joined(self.op, box)
            case Merge():
                return _unmerged(self.op, leaf, box)
            case Pad() if self.op.rows:
                return _padded(self.op, leaf, box)
            case RotaryRows():
                (order,) = self.op.to_hf([np.arange(shapes[leaf][0])])
                return of_rows(leaf, order[box[0]], box)
            case Plus() | Times():
                return BoxReads(((leaf, box),), lambda arrays: self.op.to_hf(arrays)[0])
            case _:
                return super().box_reads(shapes, leaf, box)


@dataclass(frozen=True)
class Each(Op):
    """An operation on each of several groups of tensors, which follow one another.

    Attributes:
        op: the operation on one group.
        groups: number of groups, which have the same number of tensors.
    """

    op: Op
    groups: int

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the leaves of all groups."""
        return [leaf for group in self._groups(tensors) for leaf in self.op.from_hf(group)]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the tensors of all groups."""
        return [tensor for group in self._groups(leaves) for tensor in self.op.to_hf(group)]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of all groups' leaves."""
        return [leaf for group in self._groups(shapes) for leaf in self.op.leaf_shapes(group)]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of all groups' tensors."""
        return [tensor for group in self._groups(shapes) for tensor in self.op.tensor_shapes(group)]

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the boxes of the tensors of the leaf's own group."""
        groups = self._groups(shapes)
        each = len(self.op.leaf_shapes(groups[0]))
        group, number = divmod(leaf, each)
        inner = self.op.box_reads(groups[group], number, box)
        first = group * len(groups[0])
        return BoxReads(tuple((first + at, part) for at, part in inner.reads), inner.make)

    def _groups(self, items: Sequence[_T]) -> list[Sequence[_T]]:
        size, rest = divmod(len(items), self.groups)
        if rest:
            raise ValueError(f"{self.groups} groups of the same number, found {len(items)}")
        return [items[start : start + size] for start in range(0, len(items), size)]


def _joined(split: Split, box: Box) -> BoxReads:
    """Return the boxes of the parts that a box of their concatenation overlaps."""
    extent, reads, start = box[split.axis], [], 0
    for number, size in enumerate(split.sizes):
        low, high = max(extent.start, start), min(extent.stop, start + size)
        if low < high:
            inner = (*box[: split.axis], slice(low, high), *box[split.axis + 1 :])
            reads.append((number, shifted(inner, split.axis, -start)))
        start += size
    return BoxReads(tuple(reads), lambda arrays: np.concatenate(list(arrays), axis=split.axis))


def _unmerged(merge: Merge, tensor: int, box: Box) -> BoxReads:
    """Return the range of the merged axis that a box of the separate axes covers."""
    axis, end = merge.axis, merge.axis + len(merge.sizes)
    inner = math.prod(merge.sizes[1:])
    extent = box[axis]
    merged = slice(extent.start * inner, extent.stop * inner)

    def make(arrays: Sequence[Array]) -> Array:
        shape = arrays[0].shape
        rows = extent.stop - extent.start
        separate = arrays[0].reshape(*shape[:axis], rows, *merge.sizes[1:], *shape[axis + 1 :])
        return separate[(*(slice(None),) * (axis + 1), *box[axis + 1 : end])]

    return BoxReads(((tensor, (*box[:axis], merged, *box[end:])),), make)


def _padded(pad: Pad, tensor: int, box: Box) -> BoxReads:
    """Return the rows of a box that are stored; `make` adds zeros for those beyond them."""
    extent = box[pad.axis]
    # A box that lies beyond all rows still needs an array, for the dtype of its zeros.
    start = min(extent.start, pad.rows - 1)
    stop = max(start + 1, min(extent.stop, pad.rows))
    stored = (*box[: pad.axis], slice(start, stop), *box[pad.axis + 1 :])
    shape = box_shape(box)

    def make(arrays: Sequence[Array]) -> Array:
        rows = max(0, min(extent.stop, pad.rows) - extent.start)
        if rows == shape[pad.axis]:
            return arrays[0]
        values = np.zeros(shape, arrays[0].dtype)
        before = (slice(None),) * pad.axis
        values[(*before, slice(0, rows))] = arrays[0][(*before, slice(0, rows))]
        return values

    return BoxReads(((tensor, stored),), make)
