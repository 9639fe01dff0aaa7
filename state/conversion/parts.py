"""Boxes of tensors, and of which boxes of theirs a box of a leaf of ours is made. NumPy only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.storage.arrays import Box

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
    """How a box of one leaf of ours is made.

    Attributes:
        reads: boxes of theirs that it takes: number of the tensor, and which box of it.
        make: the box of ours, of those boxes in their order; perhaps a view of them.
    """

    reads: tuple[tuple[int, Box], ...]
    make: Callable[[Sequence[Array]], Array]


def whole_box(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return tuple(slice(0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """Its shape."""
    return tuple(part.stop - part.start for part in box)


def shifted(box: Box, axis: int, by: int) -> Box:
    """A box, moved along one axis."""
    part = box[axis]
    return (*box[:axis], slice(part.start + by, part.stop + by), *box[axis + 1 :])


def hull(boxes: Sequence[Box]) -> Box:
    """The least box around some."""
    return tuple(
        slice(min(part.start for part in parts), max(part.stop for part in parts))
        for parts in zip(*boxes, strict=True)
    )


def common(one: Box, other: Box) -> Box | None:
    """What two boxes share; None if nothing."""
    both = [
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    ]
    return None if any(part.start >= part.stop for part in both) else tuple(both)


def elements(box: Box) -> int:
    """How many numbers are in it."""
    return math.prod(box_shape(box))
