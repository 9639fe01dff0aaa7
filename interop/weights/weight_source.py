"""Protocols of sources of pretrained weights, which read tensors, and boxes of them, by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.interop.conversion.boxes import Box
from cairn.interop.conversion.ops import Array, Shape

__all__ = ["BoxSource", "QuantizedTensor", "RowSource", "WeightSource", "equal_tensors"]

_COMPARED_ELEMENTS = 4 << 20
"""Number of elements that `equal_tensors` compares at a time."""


class BoxSource(Protocol):
    """Source of tensors by name, of which boxes can be read."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        ...

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype of each tensor, as it is read."""
        ...

    def cover(self, name: str, box: Box) -> Box:
        """Return the box of the tensor that `boxes` reads in order to return `box`."""
        ...

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Array]:
        """Return boxes of a tensor; elements that several boxes share are read only once.

        No box may be empty. The returned arrays may be views of one array, which only the caller
        uses.
        """
        ...


class WeightSource(BoxSource, Protocol):
    """Source of pretrained weights by name."""

    def read(self, name: str) -> Array:
        """Return a whole tensor in memory of its own, which the caller may change."""
        ...


class RowSource(WeightSource, Protocol):
    """Source whose tensors' rows can be read alone."""

    def rows(self, name: str, low: int, high: int) -> Array:
        """Return the rows of a tensor from `low` up to, not including, `high`."""
        ...


@dataclass(frozen=True)
class QuantizedTensor:
    """Tensor that is computed from quantized stored tensors.

    Attributes:
        name: name of the dequantized tensor.
        parts: names of the stored tensors, which the dequantized model does not have.
        shape: shape of the dequantized tensor.
        fill: fills an array of that shape and any floating dtype from a source's tensors. It
            computes in float32, and raises FloatingPointError if scales are not finite.
    """

    name: str
    parts: tuple[str, ...]
    shape: Shape
    fill: Callable[[WeightSource, Array], None]


def equal_tensors(weights: RowSource, first: str, second: str) -> bool:
    """Return whether two tensors have the same values; a few rows are read at a time."""
    shape = weights.shapes[first]
    if shape != weights.shapes[second] or not shape:
        return False
    step = max(1, _COMPARED_ELEMENTS // max(1, math.prod(shape[1:])))
    for low in range(0, shape[0], step):
        high = min(low + step, shape[0])
        # float64 represents every stored number exactly.
        ones, others = (
            weights.rows(name, low, high).astype(np.float64) for name in (first, second)
        )
        if not np.array_equal(ones, others, equal_nan=True):
            return False
    return True
