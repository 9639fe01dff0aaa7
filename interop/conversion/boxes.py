"""Boxes (hyper-rectangles) of tensors and of leaves, and which of them make up which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.storage.arrays.boxes import Box

__all__ = [
    "Box",
    "BoxReads",
    "bounding_box",
    "box_shape",
    "element_count",
    "intersection",
    "shifted",
    "whole_box",
]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class BoxReads:
    """Boxes of tensors to read for a box of one leaf, and the function that makes it from them.

    Attributes:
        reads: pairs of a tensor's number and a box of that tensor.
        make: returns the leaf's box from the arrays of `reads`, in their order; perhaps a view.
    """

    reads: tuple[tuple[int, Box], ...]
    make: Callable[[Sequence[Array]], Array]


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(extent.stop - extent.start for extent in box)


def shifted(box: Box, axis: int, by: int) -> Box:
    """Return a box, moved by `by` elements along `axis`."""
    extent = box[axis]
    return (*box[:axis], slice(extent.start + by, extent.stop + by), *box[axis + 1 :])


def bounding_box(boxes: Sequence[Box]) -> Box:
    """Return the bounding box of some boxes."""
    return tuple(
        slice(min(extent.start for extent in extents), max(extent.stop for extent in extents))
        for extents in zip(*boxes, strict=True)
    )


def intersection(first: Box, second: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = [
        slice(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(first, second, strict=True)
    ]
    return None if any(extent.start >= extent.stop for extent in both) else tuple(both)


def element_count(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(box_shape(box))
