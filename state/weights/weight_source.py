"""What gives pretrained weights: tensors, and boxes of them, read when asked for. JAX-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.state.conversion import Array, Box, Shape

__all__ = ["QuantizedTensor", "RowSource", "WeightSource", "same"]

_COMPARED_ELEMENTS = 4 << 20
"""Numbers of a tensor that are compared with another's at a time."""


class WeightSource(Protocol):
    """Tensors by name."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape."""
        ...

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """The dtype that `read` gives each tensor."""
        ...

    def read(self, name: str) -> Array:
        """One tensor, whole; a copy of its own."""
        ...

    def cover(self, name: str, box: Box) -> Box:
        """What is read of a tensor where a box of it is wanted."""
        ...

    def boxes(self, name: str, wanted: Sequence[Box]) -> list[Array]:
        """Boxes of one tensor, none of them empty; what several have in common is read once.

        They may be views of one array, which is nobody else's.
        """
        ...


class RowSource(WeightSource, Protocol):
    """Tensors of which rows can be read by themselves."""

    def rows(self, name: str, low: int, high: int) -> Array:
        """The rows of a tensor from `low` up to, not including, `high`."""
        ...


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor of the plain model, and the stored ones that it is made of.

    Attributes:
        name: in the plain model.
        parts: names of the stored ones; the plain model has none of them.
        shape: of the plain one.
        fill: dequantizes what a source holds into an array of that shape, of any floating dtype.
            The numbers are computed in float32. FloatingPointError if its scales are no
            numbers.
    """

    name: str
    parts: tuple[str, ...]
    shape: Shape
    fill: Callable[[WeightSource, Array], None]


def same(weights: RowSource, one: str, other: str) -> bool:
    """Whether two tensors have the same values; read a part at a time."""
    shape = weights.shapes[one]
    if shape != weights.shapes[other] or not shape:
        return False
    step = max(1, _COMPARED_ELEMENTS // max(1, math.prod(shape[1:])))
    for low in range(0, shape[0], step):
        high = min(low + step, shape[0])
        # float64 holds every stored number as it is.
        ones, others = (weights.rows(name, low, high).astype(np.float64) for name in (one, other))
        if not np.array_equal(ones, others, equal_nan=True):
            return False
    return True
