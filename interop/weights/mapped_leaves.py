"""Leaves of a known model that are made of another trainer's stored leaves, in blocks.

A leaf is read in boxes: the operations say which boxes of the stored leaves make up a box of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cairn.interop.conversion.boxes import Box, whole_box
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.conversion.rules import Rule
from cairn.interop.conversion.tensor_streams import cut
from cairn.interop.trainers.mapped_model import MappedModel
from cairn.interop.weights.stored_leaves import ServedLeaf
from cairn.storage.reading.item_arrays import LeafInfo
from cairn.storage.reading.reader import CheckpointReader

__all__ = ["mapped_leaves"]

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
    leaves: dict[str, ServedLeaf] = {}
    for rule in model.rules:
        stored = tuple(infos[f"{tree.root}{name}"] for name in rule.tensors)
        shapes = rule.op.leaf_shapes([info.shape for info in stored])
        for number, (name, shape) in enumerate(zip(rule.leaves, shapes, strict=True)):
            leaves[name] = _MappedLeaf(reader, tree.item, stored, rule, number, shape)
    return leaves


@dataclass(frozen=True)
class _MappedLeaf:
    """A leaf that a rule makes of stored leaves.

    Attributes:
        reader: open reader of the step.
        item: item of the stored leaves.
        stored: descriptions of the stored leaves.
        rule: the rule.
        number: number of the leaf among those that the rule makes.
        shape: shape of the leaf.
    """

    reader: CheckpointReader
    item: str
    stored: Sequence[LeafInfo]
    rule: Rule
    number: int
    shape: Shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stored[0].dtype

    @property
    def held_bytes(self) -> int:
        return _COPIES * min(_PIECE_BYTES, math.prod(self.shape) * self.dtype.itemsize)

    def blocks(self, max_bytes: int, *, transpose: bool, at: int | None = None) -> Iterator[Array]:
        """Yield the leaf's blocks; see `Leaf.blocks`."""
        whole = whole_box(self.shape)
        if at is not None:
            whole = (slice(at, at + 1), *whole[1:])
        first = 0 if at is None else 1
        for box in _pieces(whole, first, self.dtype.itemsize, transpose=transpose):
            array = self._made(box)
            if at is not None:
                array = array[0]
            yield from cut(np.swapaxes(array, -1, -2) if transpose else array, max_bytes)

    def _made(self, box: Box) -> Array:
        part = self.rule.op.box_reads([info.shape for info in self.stored], self.number, box)
        return part.make(
            [
                self.reader.read(self.item, self.stored[number].path, inner)
                for number, inner in part.reads
            ]
        )


def _pieces(whole: Box, first: int, itemsize: int, *, transpose: bool) -> Iterator[Box]:
    """Yield boxes that make up a leaf, in the order of the result's first axis.

    Args:
        whole: box of all that is wanted.
        first: first axis that may be cut.
        itemsize: bytes of an element.
        transpose: the last two axes will be swapped.
    """
    lengths = [extent.stop - extent.start for extent in whole]
    axis = len(whole) - 1 if transpose and len(whole) - first == 2 else first
    if axis >= len(whole) or not math.prod(lengths):
        yield whole
        return
    rows = max(1, _PIECE_BYTES // (itemsize * (math.prod(lengths) // lengths[axis])))
    for start in range(0, lengths[axis], rows):
        stop = min(start + rows, lengths[axis])
        yield (*whole[:axis], slice(start, stop), *whole[axis + 1 :])
