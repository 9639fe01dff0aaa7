"""Reads of slices of leaves that rules make, each from only those boxes of tensors that it needs.

Slices that need the same bytes are read together, others one after the other. So each byte is read
once, and host memory holds as little as possible.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.interop.conversion.box_reads import merge_boxes
from cairn.interop.conversion.boxes import (
    Box,
    BoxReads,
    bounding_box,
    box_shape,
    element_count,
)
from cairn.interop.conversion.ops import Array
from cairn.interop.conversion.rules import Rule
from cairn.interop.weights.weight_source import BoxSource

__all__ = ["Slice", "one_dtype", "read_slices", "slice_batches", "slice_bytes"]

READERS: Final = 4
"""Number of threads that read the tensors of one batch, such as experts."""


class Slice(NamedTuple):
    """Box of one leaf of a rule.

    Attributes:
        leaf: index of the leaf among the rule's leaves.
        box: the box in the leaf.
    """

    leaf: int
    box: Box


class _Read(NamedTuple):
    """Box of a stored tensor that a slice needs.

    Attributes:
        slice: index of the slice.
        tensor: index of the tensor among the rule's tensors.
        box: the box in the tensor.
    """

    slice: int
    tensor: int
    box: Box


def read_slices(
    source: BoxSource, rule: Rule, slices: Sequence[Slice]
) -> Iterator[tuple[Slice, Array]]:
    """Yield each slice with its values, in any order; the values may be views of shared arrays.

    Host memory holds one slice, or the slices that share bytes, and the boxes that they need.
    """
    empty = [leaf_slice for leaf_slice in slices if 0 in box_shape(leaf_slice.box)]
    for leaf_slice in empty:
        yield leaf_slice, np.empty(box_shape(leaf_slice.box), source.dtypes[rule.tensors[0]])
    filled = [leaf_slice for leaf_slice in slices if leaf_slice not in empty]
    reads = _box_reads(source, rule, filled)
    for numbers in _batches(source, rule, reads):
        arrays = _arrays(source, rule, reads, numbers)
        while numbers:
            number = numbers.pop()
            boxes = arrays.pop(number)
            dtypes = [array.dtype for array in boxes]
            if len({*dtypes}) > 1:
                boxes = [array.astype(one_dtype(dtypes)) for array in boxes]
            yield filled[number], reads[number].make(boxes)


def one_dtype(dtypes: Sequence[np.dtype[Any]]) -> np.dtype[Any]:
    """Return the dtype that represents the values of all dtypes exactly.

    The dtypes must be equal, or all floating.
    """
    different = dict.fromkeys(dtypes)
    try:
        return np.result_type(*different)
    except TypeError:  # NumPy has none for float16 and bfloat16
        return np.dtype(np.float32)


def slice_bytes(source: BoxSource, rule: Rule, slices: Sequence[Slice]) -> int:
    """Return the number of bytes that `read_slices` reads for these slices."""
    filled = [leaf_slice for leaf_slice in slices if 0 not in box_shape(leaf_slice.box)]
    covers = _covers(source, rule, _reads(_box_reads(source, rule, filled)))
    return sum(
        element_count(cover) * source.dtypes[rule.tensors[tensor]].itemsize
        for tensor, boxes in covers.items()
        for cover in boxes
    )


def slice_batches(source: BoxSource, rule: Rule, slices: Sequence[Slice]) -> list[list[Slice]]:
    """Return the slices in batches; those that share bytes are in one. None may be empty."""
    batches = _batches(source, rule, _box_reads(source, rule, slices))
    return [[slices[number] for number in batch] for batch in batches]


def _box_reads(source: BoxSource, rule: Rule, slices: Iterable[Slice]) -> list[BoxReads]:
    shapes = [source.shapes[name] for name in rule.tensors]
    return [rule.op.box_reads(shapes, leaf_slice.leaf, leaf_slice.box) for leaf_slice in slices]


def _reads(box_reads: Sequence[BoxReads], numbers: Iterable[int] | None = None) -> list[_Read]:
    chosen = range(len(box_reads)) if numbers is None else numbers
    return [_Read(n, tensor, box) for n in chosen for tensor, box in box_reads[n].reads]


def _covers(source: BoxSource, rule: Rule, reads: Sequence[_Read]) -> dict[int, list[Box]]:
    """Return the boxes to read of each tensor, by its index; overlapping boxes are merged."""
    boxes: dict[int, list[Box]] = {}
    for read in reads:
        boxes.setdefault(read.tensor, []).append(read.box)
    return {
        tensor: merge_boxes(tensor_boxes, functools.partial(source.cover, rule.tensors[tensor]))
        for tensor, tensor_boxes in boxes.items()
    }


def _batches(source: BoxSource, rule: Rule, box_reads: Sequence[BoxReads]) -> list[list[int]]:
    """Divide slices into batches, given by their indices; slices that share bytes are in one."""
    reads = _reads(box_reads)
    covers = _covers(source, rule, reads)
    batch_of = {number: {number} for number in range(len(box_reads))}
    first_at: dict[tuple[int, int], int] = {}
    for read in reads:
        boxes = covers[read.tensor]
        at = next(n for n, box in enumerate(boxes) if bounding_box([read.box, box]) == box)
        first = first_at.setdefault((read.tensor, at), read.slice)
        if batch_of[first] is not batch_of[read.slice]:
            batch_of[first] |= batch_of[read.slice]
            batch_of |= dict.fromkeys(batch_of[first], batch_of[first])
    return [sorted(batch) for number, batch in batch_of.items() if number == min(batch)]


def _arrays(
    source: BoxSource, rule: Rule, box_reads: Sequence[BoxReads], numbers: Sequence[int]
) -> dict[int, list[Array]]:
    """Read the boxes that these slices need, and return their values by the slice's index."""
    reads = _reads(box_reads, numbers)
    places: dict[int, list[int]] = {}
    for place, box_read in enumerate(reads):
        places.setdefault(box_read.tensor, []).append(place)

    def read(tensor: int) -> list[Array]:
        return source.boxes(rule.tensors[tensor], [reads[n].box for n in places[tensor]])

    with ThreadPoolExecutor(READERS, "cairn-tensors") as pool:
        # A single tensor is read in this thread.
        tensors = map(read, places) if len(places) == 1 else pool.map(read, places)
        by_tensor = dict(zip(places, tensors, strict=True))
    by_place = {
        place: array
        for tensor, arrays in by_tensor.items()
        for place, array in zip(places[tensor], arrays, strict=True)
    }
    by_slice: dict[int, list[Array]] = {number: [] for number in numbers}
    for place, box_read in enumerate(reads):
        by_slice[box_read.slice].append(by_place[place])
    return by_slice
