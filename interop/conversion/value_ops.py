"""Operations that change each number alike: a factor, or a number that is added.

They compute in float32 at least, and round once to the tensor's dtype. So an inverse returns the
same bits where no rounding was needed (factors that are powers of two), else numbers that differ
by one rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cairn.interop.conversion.boxes import Box, BoxReads
from cairn.interop.conversion.ops import Array, Op, Shape

__all__ = ["Plus", "Times"]


class _Numbers(Op):
    """Operation that keeps shapes, and changes each element by itself."""

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        return list(shapes)

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        return list(shapes)

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the same box of the tensor."""
        return BoxReads(((leaf, box),), lambda arrays: self.from_hf(arrays)[0])


@dataclass(frozen=True)
class Plus(_Numbers):
    """Operation whose tensors are the leaves plus a number."""

    number: float

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the tensors minus the number."""
        return [array - array.dtype.type(self.number) for array in tensors]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the leaves plus the number."""
        return [array + array.dtype.type(self.number) for array in leaves]


@dataclass(frozen=True)
class Times(_Numbers):
    """Operation whose tensors are the leaves times a number, such as queries that are scaled."""

    number: float

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the tensors divided by the number."""
        return [_rounded(np.divide, array, self.number) for array in tensors]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the leaves times the number."""
        return [_rounded(np.multiply, array, self.number) for array in leaves]


def _rounded(operation: np.ufunc, array: Array, number: float) -> Array:
    wide = array if array.dtype.itemsize >= np.dtype(np.float32).itemsize else array.astype("f4")
    with np.errstate(over="ignore", invalid="ignore"):  # the writer counts them
        changed: Array = operation(wide, wide.dtype.type(number)).astype(array.dtype)
    return changed
