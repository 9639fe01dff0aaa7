"""Leaves of a known model that are made of another trainer's stored leaves, in blocks.

A leaf is read in boxes: the operations say which boxes of the stored leaves make up a box of it.
Where nothing is reordered, blocks come as they are stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cairn.interop.conversion.boxes import Box, whole_box
from cairn.interop.conversion.layout_ops import Merge, Unstack
from cairn.interop.conversion.ops import Array, Chain, Op, Rename, Shape
from cairn.interop.conversion.rules import Rule
from cairn.interop.conversion.tensor_streams import cut
from cairn.interop.conversion.value_ops import Plus, Times
from cairn.interop.trainers.mapped_model import MappedModel
from cairn.interop.weights.stacked_arrays import StackedArrays, array_bytes, release
from cairn.interop.weights.stored_leaves import ServedLeaf
from cairn.storage.reading.item_arrays import LeafInfo
from cairn.storage.reading.reader import CheckpointReader

__all__ = ["by_stored_leaf", "mapped_leaves"]

_PIECE_BYTES: Final = 32 << 20
"""Most bytes of a leaf that are made at a time; operations hold a few times as many."""

_COPIES: Final = 4
"""What is read, what an operation makes of it, and a copy in C order, with some room."""


def mapped_leaves(reader: CheckpointReader, model: MappedModel) -> dict[str, ServedLeaf]:
    """Return the leaves of a mapped model, by their paths.

    Args:
        reader: open reader of the step.
        model: the model, whose rules fit the stored leaves.
    """
    tree = model.tree
    infos = reader.leaves(tree.item)
    stacked = StackedArrays(reader, tree.item)
    leaves: dict[str, ServedLeaf] = {}
    for rule in model.rules:
        stored = tuple(infos[f"{tree.root}{name}"] for name in rule.tensors)
        shapes = rule.op.leaf_shapes([info.shape for info in stored])
        for number, (name, shape) in enumerate(zip(rule.leaves, shapes, strict=True)):
            source = _Source(reader, tree.item, stored, stacked)
            leaves[name] = _MappedLeaf(source, rule.op, number, shape)
    return leaves


def by_stored_leaf(rules: Sequence[Rule], model: MappedModel) -> list[Rule]:
    """Return a family's rules, with those together whose leaves come from one stored leaf.

    Args:
        rules: rules from leaves of the model to tensors.
        model: the mapped model.
    """
    order = {leaf: number for number, rule in enumerate(model.rules) for leaf in rule.leaves}
    return sorted(rules, key=lambda rule: order[rule.leaves[0]])


@dataclass(frozen=True)
class _Source:
    """Stored leaves of a rule.

    Attributes:
        reader: open reader of the step.
        item: item of the leaves.
        stored: descriptions of the leaves.
        stacked: arrays of the item that stack layers.
    """

    reader: CheckpointReader
    item: str
    stored: tuple[LeafInfo, ...]
    stacked: StackedArrays

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of the leaves."""
        return [info.shape for info in self.stored]

    def read(self, number: int, box: Box) -> Array:
        """Return a box of a leaf."""
        return self.reader.read(self.item, self.stored[number].path, box)


@dataclass(frozen=True)
class _MappedLeaf:
    """A leaf that an operation makes of stored leaves.

    Attributes:
        source: the stored leaves.
        op: the operation.
        number: number of the leaf among those that the operation makes.
        shape: shape of the leaf.
    """

    source: _Source
    op: Op
    number: int
    shape: Shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.source.stored[0].dtype

    @property
    def held_bytes(self) -> int:
        made = _COPIES * min(_PIECE_BYTES, math.prod(self.shape) * self.dtype.itemsize)
        unstacks = isinstance(_steps(self.op)[0], Unstack)
        return made + (array_bytes(self.source.stored[0]) if unstacks else 0)

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        """Yield the leaf's blocks; see `Leaf.blocks`."""
        ops = _steps(self.op)
        if all(isinstance(op, Rename | Merge | Plus | Times) for op in ops):
            return self._as_stored(ops, max_bytes, transpose=transpose, at=at)
        return self._in_boxes(ops, max_bytes, transpose=transpose, at=at)

    def _as_stored(
        self, ops: Sequence[Op], max_bytes: int, *, transpose: bool, at: int | None
    ) -> Iterator[Array]:
        """Yield blocks of a stored leaf whose axes are only merged, and its numbers changed."""
        groups: list[list[int]] = [[axis] for axis in range(len(self.source.shapes[0]))]
        for op in ops:
            if isinstance(op, Merge):
                end = op.axis + len(op.sizes)
                groups[op.axis : end] = [
                    [axis for group in groups[op.axis : end] for axis in group]
                ]
        if transpose:
            groups[-2:] = groups[:-3:-1]
        changes = [op for op in ops if isinstance(op, Plus | Times)]
        blocks = self.source.reader.iter_blocks(
            self.source.item,
            self.source.stored[0].path,
            max_bytes=max_bytes,
            transpose=[axis for group in groups for axis in group],
            index=None if at is None else (at,),
        )
        for block in blocks:
            changed = block if at is None else block.reshape(block.shape[1:])
            for change in changes:
                (changed,) = change.from_hf([changed])
            yield changed

    def _in_boxes(
        self, ops: Sequence[Op], max_bytes: int, *, transpose: bool, at: int | None
    ) -> Iterator[Array]:
        """Yield blocks that are made of boxes of the stored leaves."""
        first, layers = ops[0], None
        if isinstance(first, Unstack):
            layers = self.source.stacked.layers(self.source.stored[0], first.axis)
        whole = whole_box(self.shape)
        if at is not None:
            whole = (slice(at, at + 1), *whole[1:])
        for box in _pieces(whole, at is not None, self.dtype.itemsize, transpose=transpose):
            if layers is None:
                part = self.op.box_reads(self.source.shapes, self.number, box)
                made = part.make([self.source.read(number, inner) for number, inner in part.reads])
            else:
                layer = layers[self.number]
                rest = Chain((Rename(), *ops[1:]))
                part = rest.box_reads([layer.shape], 0, box)
                made = part.make([layer[inner] for _, inner in part.reads])
            if at is not None:
                made = made[0]
            yield from cut(np.swapaxes(made, -1, -2) if transpose else made, max_bytes)
            if layers is not None:
                release(layers)


def _steps(op: Op) -> tuple[Op, ...]:
    return op.ops if isinstance(op, Chain) else (op,)


def _pieces(whole: Box, inside: bool, itemsize: int, *, transpose: bool) -> Iterator[Box]:
    """Yield boxes that make up a leaf, in the order of the result's first axis.

    Args:
        whole: box of all that is wanted.
        inside: the first axis has one index, and is no axis of the result.
        itemsize: bytes of an element.
        transpose: the last two axes will be swapped.
    """
    lengths = [extent.stop - extent.start for extent in whole]
    axis = int(inside)
    if transpose and len(whole) - axis == 2:
        axis = len(whole) - 1
    if axis >= len(whole) or not math.prod(lengths):
        yield whole
        return
    rows = max(1, _PIECE_BYTES // (itemsize * (math.prod(lengths) // lengths[axis])))
    for start in range(0, lengths[axis], rows):
        stop = min(start + rows, lengths[axis])
        yield (*whole[:axis], slice(start, stop), *whole[axis + 1 :])
