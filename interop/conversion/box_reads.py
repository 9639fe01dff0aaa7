"""Reads of boxes of tensors that are stored in C order, in pieces.

A box is a few long stretches of a tensor's bytes, or many short ones: some columns of a matrix are
one stretch in each row. Gaps between short stretches are read too, and dropped.
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
"""Gaps of at most this size are read along: another request to a store costs more."""

PIECE_BYTES: Final = 8 << 20
"""Most bytes that a thread reads at a time, and holds besides the boxes that they belong to."""

READERS: Final = 4
"""Threads that read pieces of one tensor."""


def covering_box(shape: Shape, itemsize: int, box: Box) -> Box:
    """Return the box that a read of `box` takes: itself, or the whole rows that it lies in.

    Args:
        shape: of the tensor.
        itemsize: bytes of a number.
        box: of it.
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
        boxes: of one tensor.
        cover: gives the box that is read for one.
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
    """Return boxes of one tensor; read what several share only once.

    Besides them each of `READERS` threads holds at most `PIECE_BYTES`, or one number. Boxes of the
    same rows may be views of one array, if that is no larger than all of them.

    Args:
        shape: of the tensor.
        dtype: of its numbers.
        boxes: none of them empty.
        read: fills an array of one axis with the tensor's numbers from an index on, in C order.
            Called from several threads.
    """
    filled: dict[int, Array] = {}
    for cover in merge_boxes(boxes, lambda box: covering_box(shape, dtype.itemsize, box)):
        inside = [
            number for number, box in enumerate(boxes) if intersection(box, cover) is not None
        ]
        kept = [boxes[number] for number in inside]
        if len(kept) > 1 and sum(map(element_count, kept)) >= element_count(cover):
            kept = [cover]
        # Aligned: a CPU device takes such memory as it is.
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
    """Read the pieces that overlap a box; one that lies whole in a box goes straight into it."""

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
            pass  # what one raises is raised here, and those that wait are given up


def _within(box: Box, outer: Box) -> Any:
    """Return a box relative to a box around it; for no axes, everything."""
    inner = (
        slice(extent.start - whole.start, extent.stop - whole.start)
        for extent, whole in zip(box, outer, strict=True)
    )
    return (*inner, ...)


def _pieces(shape: Shape, box: Box, limit: int) -> Iterator[Box]:
    """Yield a box in parts, each of which is one stretch of at most `limit` numbers."""
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
