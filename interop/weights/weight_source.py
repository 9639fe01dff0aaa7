"""Protocols of pretrained weights: tensors, and boxes of them, read when asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.interop.conversion.boxes import Box
from cairn.interop.conversion.ops import Array, Shape

__all__ = ["QuantizedTensor", "RowSource", "WeightSource", "equal_tensors"]

_COMPARED_ELEMENTS = 4 << 20
"""Elements of two tensors that are compared at a time."""


class WeightSource(Protocol):
    """Tensors by name."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        ...

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype that `read` gives each tensor."""
        ...

    def read(self, name: str) -> Array:
        """Return a whole tensor, as a copy of its own."""
        ...

    def cover(self, name: str, box: Box) -> Box:
        """Return the box that a read of a tensor's box takes."""
        ...

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Array]:
        """Return boxes of a tensor, none of them empty; read what several share only once.

        They may be views of one array, which nobody else uses.
        """
        ...


class RowSource(WeightSource, Protocol):
    """Tensors whose rows can be read alone."""

    def rows(self, name: str, low: int, high: int) -> Array:
        """Return the rows of a tensor from `low` up to, not including, `high`."""
        ...


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of the plain model, and the stored ones that it is made of.

    Attributes:
        name: in the plain model.
        parts: names of the stored ones; the plain model has none of them.
        shape: of the plain one.
        fill: dequantizes a source's tensors into an array of that shape, of any floating dtype.
            It computes in float32, and raises FloatingPointError if scales are not finite.
    """

    name: str
    parts: tuple[str, ...]
    shape: Shape
    fill: Callable[[WeightSource, Array], None]


def equal_tensors(weights: RowSource, first: str, second: str) -> bool:
    """Return whether two tensors have the same values; read them a few rows at a time."""
    shape = weights.shapes[first]
    if shape != weights.shapes[second] or not shape:
        return False
    step = max(1, _COMPARED_ELEMENTS // max(1, math.prod(shape[1:])))
    for low in range(0, shape[0], step):
        high = min(low + step, shape[0])
        # float64 holds every stored number as it is.
        ones, others = (
            weights.rows(name, low, high).astype(np.float64) for name in (first, second)
        )
        if not np.array_equal(ones, others, equal_nan=True):
            return False
    return True
