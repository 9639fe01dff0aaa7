"""Reads of boxes of tensors that are stored in C order, in pieces.

A box is one or more contiguous ranges of a tensor's bytes: some columns of a matrix are one range
in each row. Short gaps between ranges are read too, and dropped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from cairn.interop.conversion.boxes import (
    Box,
    bounding_box,
    box_shape,
    element_count,
    intersection,
    whole_box,
)
from cairn.interop.conversion.ops import Array, Shape
from cairn.storage.arrays.box_buffers import aligned_empty

__all__ = ["covering_box", "merge_boxes", "read_boxes"]

GAP_BYTES: Final = 1 << 20
"""Largest gap that is read too: another request to a store would cost more."""

PIECE_BYTES: Final = 8 << 20
"""Most bytes of a thread's read; they are in memory beside the boxes that are filled from them."""

READERS: Final = 4
"""Number of threads that read pieces of one tensor."""


def covering_box(shape: Shape, itemsize: int, box: Box) -> Box:
    """Return the box to read for `box`: itself, or one grown to whole rows where gaps are short.

    Args:
        shape: shape of the tensor.
        itemsize: bytes of one element.
        box: a box of the tensor.
    """
    cover = list(box)
    for axis in reversed(range(len(shape))):
        if cover[axis] == slice(0, shape[axis]):
            continue
        before = [n for n in range(axis) if cover[n].stop - cover[n].start > 1]
        if not before:
            break
        inner = itemsize * math.prod(shape[axis + 1 :])
        step = itemsize * math.prod(shape[before[-1] + 1 :])
        if step - (cover[axis].stop - cover[axis].start) * inner > GAP_BYTES:
            break
        cover[before[-1] + 1 :] = whole_box(shape[before[-1] + 1 :])
    return tuple(cover)


def merge_boxes(boxes: Sequence[Box], cover: Callable[[Box], Box]) -> list[Box]:
    """Return the boxes to read for several boxes, so that no two of them overlap.

    Args:
        boxes: boxes of one tensor.
        cover: returns the box to read for a box, such as `covering_box`.
    """
    covers: list[Box] = []
    for box in boxes:
        grown = cover(box)
        while touching := [other for other in covers if intersection(grown, other) is not None]:
            if touching == [grown]:
                break
            covers = [other for other in covers if other not in touching]
            grown = cover(bounding_box([grown, *touching]))
        if grown not in covers:
            covers.append(grown)
    return covers


def read_boxes(
    shape: Shape, dtype: np.dtype[Any], boxes: Sequence[Box], read: Callable[[int, Array], None]
) -> list[Array]:
    """Return boxes of one tensor; elements that several boxes share are read only once.

    Besides the boxes, each of `READERS` threads needs at most `PIECE_BYTES` of memory, or one
    element. Boxes of the same rows may be views of one array, if it is no larger than all of them
    together.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        boxes: the boxes; none may be empty.
        read: fills a one-dimensional array with the tensor's elements, in C order, from a flat
            index on. It is called from several threads.
    """
    filled: dict[int, Array] = {}
    for cover in merge_boxes(boxes, lambda box: covering_box(shape, dtype.itemsize, box)):
        inside = [
            number for number, box in enumerate(boxes) if intersection(box, cover) is not None
        ]
        kept = [boxes[number] for number in inside]
        if len(kept) > 1 and sum(map(element_count, kept)) >= element_count(cover):
            kept = [cover]
        # Aligned memory becomes an array of a CPU device without a copy.
        arrays = [aligned_empty([box_shape(box)], dtype)[0] for box in kept]
        _fill(
            arrays, kept, _pieces(shape, cover, max(1, PIECE_BYTES // dtype.itemsize)), shape, read
        )
        if len(kept) < len(inside):
            arrays = [arrays[0][_within(boxes[number], cover)] for number in inside]
        filled |= dict(zip(inside, arrays, strict=True))
    return [filled[number] for number in range(len(boxes))]


def _fill(
    arrays: Sequence[Array],
    boxes: Sequence[Box],
    pieces: Iterable[Box],
    shape: Shape,
    read: Callable[[int, Array], None],
) -> None:
    """Fill the arrays of `boxes` from the pieces that overlap them.

    A piece that lies inside a single box is read directly into that box's array.
    """

    def fill(piece: Box) -> None:
        start = sum(
            extent.start * math.prod(shape[axis + 1 :]) for axis, extent in enumerate(piece)
        )
        places = [
            (array[_within(shared, box)], _within(shared, piece))
            for array, box in zip(arrays, boxes, strict=True)
            if (shared := intersection(piece, box)) is not None
        ]
        place, _ = places[0]
        if len(places) == 1 and place.size == element_count(piece) and place.flags.c_contiguous:
            read(start, place.reshape(-1))
            return
        (values,) = aligned_empty([box_shape(piece)], arrays[0].dtype)
        read(start, values.reshape(-1))
        for place, within in places:
            place[...] = values[within]

    needed = [part for part in pieces if any(intersection(part, box) is not None for box in boxes)]
    if len(needed) == 1:
        fill(needed[0])
        return
    with ThreadPoolExecutor(READERS, "cairn-pieces") as pool:
        for _ in pool.map(fill, needed):
            pass  # raise a thread's error here; the executor drops reads that wait


def _within(box: Box, outer: Box) -> Any:
    """Return a box's index relative to a box that contains it; `...` where there are no axes."""
    inner = (
        slice(extent.start - whole.start, extent.stop - whole.start)
        for extent, whole in zip(box, outer, strict=True)
    )
    return (*inner, ...)


def _pieces(shape: Shape, box: Box, limit: int) -> Iterator[Box]:
    """Yield boxes that make up `box`, each a contiguous range of at most `limit` elements."""
    if not shape:
        yield ()
        return
    partial = [axis for axis, extent in enumerate(box) if extent != slice(0, shape[axis])]
    axis = partial[-1] if partial else 0
    while math.prod(shape[axis + 1 :]) > limit:
        axis += 1
    rows = max(1, limit // max(1, math.prod(shape[axis + 1 :])))
    for index in itertools.product(*(range(extent.start, extent.stop) for extent in box[:axis])):
        fixed = tuple(slice(n, n + 1) for n in index)
        for low in range(box[axis].start, box[axis].stop, rows):
            high = min(low + rows, box[axis].stop)
            yield (*fixed, slice(low, high), *box[axis + 1 :])
