"""Boxes of tensors, and the boxes of theirs that make a box of a leaf of ours. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.storage.arrays.boxes import Box

__all__ = [
    "Box",
    "Part",
    "box_shape",
    "common",
    "elements",
    "hull",
    "shifted",
    "whole_box",
]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Part:
    """Recipe of a box of one leaf of ours.

    Attributes:
        reads: boxes of theirs that it takes: number of the tensor, and box of it.
        make: makes the box of ours from those boxes in their order; perhaps a view of them.
    """

    reads: tuple[tuple[int, Box], ...]
    make: Callable[[Sequence[Array]], Array]


def whole_box(shape: Sequence[int]) -> Box:
    """Return the box of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Return the shape of a box."""
    return tuple(part.stop - part.start for part in box)


def shifted(box: Box, axis: int, by: int) -> Box:
    """Return a box, moved along one axis."""
    part = box[axis]
    return (*box[:axis], slice(part.start + by, part.stop + by), *box[axis + 1 :])


def hull(boxes: Sequence[Box]) -> Box:
    """Return the bounding box of some boxes."""
    return tuple(
        slice(min(part.start for part in parts), max(part.stop for part in parts))
        for parts in zip(*boxes, strict=True)
    )


def common(one: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    both = [
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    ]
    return None if any(part.start >= part.stop for part in both) else tuple(both)


def elements(box: Box) -> int:
    """Return the number of elements in a box."""
    return math.prod(box_shape(box))
