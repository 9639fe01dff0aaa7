"""Operations on the axes of tensors: layers unstacked, heads merged, axes permuted, rows padded.

Trees of trainers stack all layers in one array, and keep heads as an axis of their own. Each
operation moves every element, and changes none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cairn.interop.conversion.boxes import Box, BoxReads
from cairn.interop.conversion.ops import Array, Shape, Stack

__all__ = ["Merge", "Pad", "Permute", "Unstack"]


@dataclass(frozen=True)
class Unstack:
    """One tensor whose `axis` counts `count` leaves, such as the layers of a scan."""

    count: int
    axis: int = 0

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return one leaf for each index of the axis."""
        return Stack(self.count, self.axis).to_hf(tensors)

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the leaves, stacked along the axis."""
        return Stack(self.count, self.axis).from_hf(leaves)

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shape without the axis, for each leaf."""
        return Stack(self.count, self.axis).tensor_shapes(shapes)

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the stacked shape."""
        return Stack(self.count, self.axis).leaf_shapes(shapes)

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the box at the leaf's index of the axis."""
        inner = (*box[: self.axis], slice(leaf, leaf + 1), *box[self.axis :])
        return BoxReads(((0, inner),), lambda arrays: np.squeeze(arrays[0], self.axis))


@dataclass(frozen=True)
class Permute:
    """Axes in another order: axis k of a leaf is axis `axes[k]` of its tensor."""

    axes: tuple[int, ...]

    @property
    def back(self) -> tuple[int, ...]:
        """The order that undoes this one."""
        return tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return each tensor with its axes permuted."""
        return [array.transpose(self.axes) for array in tensors]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return each leaf with its axes in the tensor's order."""
        return [array.transpose(self.back) for array in leaves]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return each shape, permuted."""
        return [self._permuted(shape, self.axes) for shape in shapes]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return each shape in the tensor's order."""
        return [self._permuted(shape, self.back) for shape in shapes]

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the box with its axes in the tensor's order."""
        inner = tuple(box[axis] for axis in self.back)
        return BoxReads(((leaf, inner),), lambda arrays: arrays[0].transpose(self.axes))

    def _permuted(self, shape: Shape, axes: Sequence[int]) -> Shape:
        if len(shape) != len(axes):
            raise ValueError(f"{len(axes)} axes to permute, found shape {shape}")
        return tuple(shape[axis] for axis in axes)


@dataclass(frozen=True)
class Merge:
    """Neighbouring axes of a tensor that are one axis of the leaf, such as heads and their size.

    Attributes:
        sizes: lengths of the tensor's axes.
        axis: the first of them, and the leaf's axis.
    """

    sizes: tuple[int, ...]
    axis: int = 0

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return each tensor with the axes merged."""
        return [array.reshape(self._merged(array.shape)) for array in tensors]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return each leaf with the axis split."""
        return [array.reshape(self._split(array.shape)) for array in leaves]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return each shape with the axes merged."""
        return [self._merged(shape) for shape in shapes]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return each shape with the axis split."""
        return [self._split(shape) for shape in shapes]

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the indices of the first axis that the box touches, whole along the others."""
        inner = math.prod(self.sizes[1:])
        extent = box[self.axis]
        first, last = extent.start // inner, -(-extent.stop // inner)
        rest = tuple(slice(0, size) for size in self.sizes[1:])
        outer = (*box[: self.axis], slice(first, last), *rest, *box[self.axis + 1 :])
        skipped = extent.start - first * inner
        cut = slice(skipped, skipped + extent.stop - extent.start)

        def make(arrays: Sequence[Array]) -> Array:
            shape = arrays[0].shape
            after = shape[self.axis + len(self.sizes) :]
            merged = arrays[0].reshape(*shape[: self.axis], -1, *after)
            return merged[(*(slice(None),) * self.axis, cut)]

        return BoxReads(((leaf, outer),), make)

    def _merged(self, shape: Shape) -> Shape:
        end = self.axis + len(self.sizes)
        if tuple(shape[self.axis : end]) != self.sizes:
            raise ValueError(f"axes of {list(self.sizes)} from {self.axis} on, found shape {shape}")
        return (*shape[: self.axis], math.prod(self.sizes), *shape[end:])

    def _split(self, shape: Shape) -> Shape:
        length = math.prod(self.sizes)
        if len(shape) <= self.axis or shape[self.axis] != length:
            raise ValueError(f"axis {self.axis} of length {length}, found shape {shape}")
        return (*shape[: self.axis], *self.sizes, *shape[self.axis + 1 :])


@dataclass(frozen=True)
class Pad:
    """Tensor with more rows than its leaf, such as a vocabulary that is rounded up.

    What lies in the rows beyond the leaf is lost; `to_hf` fills them with zeros.

    Attributes:
        rows: rows of the leaf.
        padded: rows of the tensor.
        axis: axis of the rows.
    """

    rows: int
    padded: int
    axis: int = 0

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the leaf's rows of each tensor."""
        return [array[(*(slice(None),) * self.axis, slice(0, self.rows))] for array in tensors]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return each leaf with zeros in the rows beyond it."""
        more = self.padded - self.rows
        return [
            np.pad(array, [(0, more if axis == self.axis else 0) for axis in range(array.ndim)])
            for array in leaves
        ]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return each shape with the leaf's rows."""
        return [self._resized(shape, self.padded, self.rows) for shape in shapes]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return each shape with the tensor's rows."""
        return [self._resized(shape, self.rows, self.padded) for shape in shapes]

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the same box of the tensor."""
        return BoxReads(((leaf, box),), lambda arrays: arrays[0])

    def _resized(self, shape: Shape, before: int, after: int) -> Shape:
        if len(shape) <= self.axis or shape[self.axis] != before or self.rows > self.padded:
            raise ValueError(f"axis {self.axis} of length {before}, found shape {shape}")
        return (*shape[: self.axis], after, *shape[self.axis + 1 :])
