"""Reads of leaves that rules make of stored leaves, for this process's devices. Imports JAX.

Each process reads only the boxes of stored leaves that its own shards need, in passes of limited
size, and puts what an operation makes of them into the memory of the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from cairn.interop.conversion.boxes import Box, box_shape, element_count
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.conversion.rules import Rule
from cairn.interop.weights.rule_slices import (
    Slice,
    one_dtype,
    read_slices,
    slice_batches,
    slice_bytes,
)
from cairn.interop.weights.weight_source import BoxSource
from cairn.state.checkpointing.restores.targets import TargetLeaf, cast_values, local_boxes
from cairn.storage.arrays.box_buffers import BoxBuffer, aligned_empty, origin_of
from cairn.storage.arrays.boxes import fill
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.leaf_reads import LeafReads

__all__ = ["PASS_BYTES", "StoredTensors", "read_rule"]

PASS_BYTES: Final = 64 << 20
"""Bytes of leaves that are made at a time; operations need up to three times as many beside."""

_READ_AGAIN: Final = 1.25
"""Passes may read this many times the bytes that one pass would read: chunks at their borders."""


class StoredTensors(BoxSource):
    """Stored leaves of several items, by "item/path"."""

    def __init__(self, leaves: Mapping[str, tuple[ItemArrays, LeafInfo]]) -> None:
        """Create the source without reading anything."""
        self._leaves = leaves
        self._shapes = {name: info.shape for name, (_, info) in leaves.items()}
        self._dtypes = {name: info.dtype for name, (_, info) in leaves.items()}

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every leaf."""
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype of every leaf."""
        return self._dtypes

    def prefetch(self, names: Iterable[str]) -> None:
        """Read the places of leaves in few requests."""
        by_item: dict[ItemArrays, list[str]] = {}
        for name in names:
            arrays, info = self._leaves[name]
            by_item.setdefault(arrays, []).append(info.path)
        for arrays, paths in by_item.items():
            arrays.prefetch(paths)

    def cover(self, name: str, box: Box) -> Box:
        """Return the chunks in which a box lies: they are decoded whole."""
        _, info = self._leaves[name]
        sides = zip(box, info.chunks or info.shape, info.shape, strict=True)
        return tuple(
            slice(extent.start // chunk * chunk, min(size, math.ceil(extent.stop / chunk) * chunk))
            for extent, chunk, size in sides
        )

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Array]:
        """Return boxes of a leaf; each chunk is decoded once."""
        arrays, info = self._leaves[name]
        regions = [
            BoxBuffer(
                tuple(extent.start for extent in box),
                aligned_empty([box_shape(box)], info.dtype)[0],
            )
            for box in boxes
        ]
        with LeafReads(arrays) as reads:
            reads.fill([(info, regions)])
        return [region.values for region in regions]


class _Buffers(NamedTuple):
    """Memory of a leaf that is being read.

    Attributes:
        origins: index of the first element of each box.
        shape: shape of each box.
        dtype: the dtype in which the leaf is made.
        boxes: the memory of each box, by the index of its first element.
        missing: boxes that are not filled yet.
    """

    origins: tuple[Shape, ...]
    shape: Shape
    dtype: np.dtype[Any]
    boxes: dict[Shape, Array]
    missing: set[Shape]

    def around(self, box: Box) -> tuple[Shape, tuple[slice, ...]]:
        """Return the buffer that contains a box, and the box's index in it."""
        for origin in self.origins:
            sides = [*zip(origin, self.shape, box, strict=True)]
            if all(at <= extent.start and extent.stop <= at + size for at, size, extent in sides):
                return origin, tuple(
                    slice(extent.start - at, extent.stop - at) for at, _, extent in sides
                )
        raise AssertionError(box)


def read_rule(source: StoredTensors, rule: Rule, targets: Sequence[TargetLeaf]) -> list[Any]:
    """Return the leaves of a rule as their targets describe them.

    Beside the leaves, host memory holds what a pass reads and makes, some `PASS_BYTES`; if no axis
    divides the leaves along chunks of the stored ones, all that this process needs for the rule.

    Args:
        source: the stored leaves, with those of the rule.
        rule: a rule whose leaves have the targets' shapes.
        targets: descriptions of the rule's leaves, in their order; none is a typed key or text.
    """
    dtype = one_dtype([source.dtypes[name] for name in rule.tensors])
    leaves: dict[int, Any] = {}
    buffers: dict[int, _Buffers] = {}
    slices: list[Slice] = []
    for number, target in enumerate(targets):
        if 0 in target.shape:
            leaves[number] = target.empty()
            continue
        shape = target.shape
        origins: tuple[Shape, ...] = ((0,) * len(shape),)
        if target.sharding is not None:
            shape, origins, _ = local_boxes(target.sharding, target.shape)
        own = dtype if target.dtype is None else np.dtype(target.dtype)
        buffers[number] = _Buffers(origins, shape, own, {}, {*origins})
        for origin in origins:
            ends = (slice(at, at + size) for at, size in zip(origin, shape, strict=True))
            slices.append(Slice(number, tuple(ends)))
    for batch in slice_batches(source, rule, slices):
        for part in _passes(source, rule, batch):
            for leaf_slice, values in read_slices(source, rule, part):
                buffer = buffers[leaf_slice.leaf]
                origin, within = buffer.around(leaf_slice.box)
                if origin not in buffer.boxes:
                    (buffer.boxes[origin],) = aligned_empty([buffer.shape], buffer.dtype)
                if values.dtype != buffer.dtype:
                    values = cast_values(values, buffer.dtype, rule.leaves[leaf_slice.leaf])
                index: Any = (*within, ...)
                fill(buffer.boxes[origin][index], values)
                del values
        for leaf_slice in batch:
            buffer = buffers[leaf_slice.leaf]
            buffer.missing.discard(tuple(extent.start for extent in leaf_slice.box))
            if not buffer.missing and leaf_slice.leaf not in leaves:
                target = targets[leaf_slice.leaf]
                leaves[leaf_slice.leaf] = _placed(target, buffer.boxes, buffer.dtype)
                buffer.boxes.clear()
    return [targets[number].finish(leaves[number]) for number in range(len(targets))]


def _placed(target: TargetLeaf, boxes: Mapping[Shape, Array], dtype: np.dtype[Any]) -> Any:
    """Return the leaf that is made of these boxes, on the target's devices."""
    if target.sharding is None:
        (values,) = boxes.values()
        return values
    parts = dict(boxes)
    array = target.place(target.shape, dtype, lambda index: parts[origin_of(index)])
    return jax.block_until_ready(array)  # so that host memory holds one leaf on its way to devices


def _passes(source: BoxSource, rule: Rule, slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Yield slices in parts of some `PASS_BYTES`, if that reads few chunks again."""
    itemsize = max(source.dtypes[name].itemsize for name in rule.tensors)
    total = sum(element_count(leaf_slice.box) for leaf_slice in slices) * itemsize
    count = math.ceil(total / PASS_BYTES)
    parts = [[*slices]]
    if count > 1:
        least = _READ_AGAIN * slice_bytes(source, rule, slices)
        for axis in range(max(len(leaf_slice.box) for leaf_slice in slices)):
            divided = _divided(slices, axis, count)
            cost = sum(slice_bytes(source, rule, part) for part in divided)
            if cost <= least and len(divided) > 1:
                least, parts = cost, divided
    yield from parts


def _divided(slices: Sequence[Slice], axis: int, count: int) -> list[list[Slice]]:
    """Return the slices in at most `count` parts along an axis of the leaves."""
    parts = []
    for number in range(count):
        part = []
        for leaf, box in slices:
            if axis >= len(box):
                part += [Slice(leaf, box)] if number == 0 else []
                continue
            start, size = box[axis].start, box[axis].stop - box[axis].start
            low, high = size * number // count, size * (number + 1) // count
            if low < high:
                within = slice(start + low, start + high)
                part.append(Slice(leaf, (*box[:axis], within, *box[axis + 1 :])))
        if part:
            parts.append(part)
    return parts
