"""Invertible operations between tensors of another format and a model's leaves.

An operation works on the tensors of one rule, so memory is bounded by the largest rule, not by the
model. Shapes are computed without reading weights. `box_reads` returns which boxes of the tensors
make up a box of a leaf, so that a process reads only what its devices need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.interop.conversion.boxes import Box, BoxReads, shifted, whole_box

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]


class Op(Protocol):
    """Invertible operation from tensors of another format to a model's leaves."""

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the leaves that the tensors become."""
        ...

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the tensors that the leaves become: the exact inverse of `from_hf`."""
        ...

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of the leaves that `from_hf` returns for tensors of these shapes.

        Raises:
            ValueError: the operation can't take tensors of these shapes.
        """
        ...

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of the tensors that `to_hf` returns for leaves of these shapes.

        Raises:
            ValueError: the operation can't take leaves of these shapes.
        """
        ...

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return how to make a box of a leaf; by default from all of the rule's tensors.

        Args:
            shapes: shapes of the tensors.
            leaf: index of the leaf in what `from_hf` returns.
            box: a box of that leaf; not empty.
        """
        reads = tuple((number, whole_box(shape)) for number, shape in enumerate(shapes))
        return BoxReads(reads, lambda arrays: self.from_hf(arrays)[leaf][box])


@dataclass(frozen=True)
class Rename:
    """Operation that changes the name of a tensor and nothing else."""

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the tensors unchanged."""
        return list(tensors)

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the leaves unchanged."""
        return list(leaves)

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        return list(shapes)

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        return list(shapes)

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the box of the tensor itself."""
        return BoxReads(((leaf, box),), _first)


@dataclass(frozen=True)
class Transpose:
    """Swap of the last two axes: PyTorch stores [out, in], leaves are [in, out]."""

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return each tensor with its last two axes swapped."""
        return [np.swapaxes(array, -1, -2) for array in tensors]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return each leaf with its last two axes swapped."""
        return self.from_hf(leaves)

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return each shape with its last two axes swapped."""
        for shape in shapes:
            _require(len(shape) >= 2, f"at least 2 axes to transpose, found shape {shape}")
        return [(*shape[:-2], shape[-1], shape[-2]) for shape in shapes]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return each shape with its last two axes swapped."""
        return self.leaf_shapes(shapes)

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the box with its last two axes swapped."""
        swapped = (*box[:-2], box[-1], box[-2])
        return BoxReads(((leaf, swapped),), lambda arrays: np.swapaxes(arrays[0], -1, -2))


@dataclass(frozen=True)
class Split:
    """Split of a fused tensor into leaves along `axis`; `sizes` are their lengths."""

    sizes: tuple[int, ...]
    axis: int = 0

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the leaves that the tensor splits into."""
        (fused,) = tensors
        return list(np.split(fused, np.cumsum(self.sizes)[:-1], axis=self.axis))

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the leaves, joined into one tensor."""
        return [np.concatenate(list(leaves), axis=self.axis)]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return one leaf's shape for each size."""
        (fused,) = shapes
        _require(
            len(fused) > self.axis and fused[self.axis] == sum(self.sizes),
            f"axis {self.axis} of {fused} to be {' + '.join(map(str, self.sizes))}",
        )
        return [(*fused[: self.axis], n, *fused[self.axis + 1 :]) for n in self.sizes]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the joined shape."""
        lengths = [shape[self.axis] if len(shape) > self.axis else None for shape in shapes]
        rest = {(*shape[: self.axis], *shape[self.axis + 1 :]) for shape in shapes}
        _require(
            lengths == list(self.sizes) and len(rest) == 1,
            f"axis {self.axis} to be {list(self.sizes)} long, found shapes {list(shapes)}",
        )
        first = shapes[0]
        return [(*first[: self.axis], sum(self.sizes), *first[self.axis + 1 :])]

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the same box of the fused tensor, shifted to where the leaf begins."""
        return BoxReads(((0, shifted(box, self.axis, sum(self.sizes[:leaf]))),), _first)


@dataclass(frozen=True)
class Stack:
    """Stack of `count` tensors (such as experts) into one leaf with one more axis, `axis`."""

    count: int
    axis: int = 0

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the tensors, stacked into one leaf."""
        return [np.stack(list(tensors), self.axis)]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return one tensor for each index of the leaf's axis."""
        (stacked,) = leaves
        return list(np.moveaxis(stacked, self.axis, 0))

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the stacked shape."""
        _require(
            len(shapes) == self.count and len(set(shapes)) == 1 and len(shapes[0]) >= self.axis,
            f"{self.count} tensors of one shape, found shapes {list(shapes)}",
        )
        return [(*shapes[0][: self.axis], self.count, *shapes[0][self.axis :])]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return one shape for each tensor."""
        (stacked,) = shapes
        _require(
            len(stacked) > self.axis and stacked[self.axis] == self.count,
            f"axis {self.axis} of length {self.count}, found shape {stacked}",
        )
        return [(*stacked[: self.axis], *stacked[self.axis + 1 :])] * self.count

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the box without the axis, of each tensor that it covers."""
        numbers, inner = box[self.axis], (*box[: self.axis], *box[self.axis + 1 :])
        reads = tuple((number, inner) for number in range(numbers.start, numbers.stop))
        return BoxReads(reads, lambda arrays: np.stack(list(arrays), self.axis))


@dataclass(frozen=True)
class RotaryRows:
    """Order of each head's rotated rows: x0 y0 x1 y1 ... in tensors, x0 x1 ... y0 y1 ... in leaves.

    x and y are rotated as a pair. Tensors have the first order in models that rotate neighbouring
    dimensions; the decoder rotates dimensions of a head's two halves.

    Attributes:
        heads: number of heads, which follow each other along the leading axis.
        start: first rotated row of each head.
        turning: number of rotated rows; None: all from `start` on.
    """

    heads: int
    start: int = 0
    turning: int | None = None

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the tensors with each head's rotated rows in halves."""
        return [self._reorder(array, halves=True) for array in tensors]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the leaves with each head's rotated rows interleaved."""
        return [self._reorder(array, halves=False) for array in leaves]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        for shape in shapes:
            divides = bool(shape) and shape[0] % self.heads == 0
            rows = shape[0] // self.heads if divides else 0
            turning = rows - self.start if self.turning is None else self.turning
            _require(
                rows > 0 and turning > 0 and turning % 2 == 0 and self.start + turning <= rows,
                f"rows to divide by 2 x {self.heads} heads, found shape {shape}",
            )
        return list(shapes)

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        return self.leaf_shapes(shapes)

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the rows of the box, read with all rows between the first and the last of them."""
        order = self._reorder(np.arange(shapes[leaf][0]), halves=True)
        return of_rows(leaf, order[box[0]], box)

    def _reorder(self, array: Array, *, halves: bool) -> Array:
        heads = array.reshape(self.heads, -1, *array.shape[1:])
        turning = heads.shape[1] - self.start if self.turning is None else self.turning
        before, part, after = np.split(heads, [self.start, self.start + turning], axis=1)
        half = turning // 2
        inner = (half, 2) if halves else (2, half)
        split = part.reshape(self.heads, *inner, *array.shape[1:])
        turned = np.swapaxes(split, 1, 2).reshape(part.shape)
        return np.concatenate([before, turned, after], axis=1).reshape(array.shape)


@dataclass(frozen=True)
class SplitGroups:
    """Split of a fused tensor whose rows are in groups; a group has `sizes[k]` rows of each leaf k.

    A leaf is the concatenation of its rows of all groups.
    """

    groups: int
    sizes: tuple[int, ...]

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the leaves; each has its rows of all groups."""
        (fused,) = tensors
        grouped = fused.reshape(self.groups, -1, *fused.shape[1:])
        pieces = np.split(grouped, np.cumsum(self.sizes)[:-1], axis=1)
        return [piece.reshape(-1, *fused.shape[1:]) for piece in pieces]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the leaves, joined group by group into one tensor."""
        rest = leaves[0].shape[1:]
        grouped = [array.reshape(self.groups, -1, *rest) for array in leaves]
        return [np.concatenate(grouped, axis=1).reshape(-1, *rest)]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return one leaf's shape for each size."""
        (fused,) = shapes
        _require(
            bool(fused) and fused[0] == self.groups * sum(self.sizes),
            f"axis 0 of {fused} to be {self.groups} x ({' + '.join(map(str, self.sizes))})",
        )
        return [(self.groups * size, *fused[1:]) for size in self.sizes]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the joined shape."""
        rows = [shape[0] if shape else None for shape in shapes]
        expected = [self.groups * size for size in self.sizes]
        _require(
            rows == expected and len({shape[1:] for shape in shapes}) == 1,
            f"axis 0 to be {expected} long, found shapes {list(shapes)}",
        )
        return [(sum(expected), *shapes[0][1:])]

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the rows of the box, read with the rows of other leaves that lie between them."""
        ((total, *_),) = shapes
        start = sum(self.sizes[:leaf])
        grouped = np.arange(total).reshape(self.groups, -1)[:, start : start + self.sizes[leaf]]
        return of_rows(0, grouped.reshape(-1)[box[0]], box)


@dataclass(frozen=True)
class Interleaved:
    """Two leaves whose columns alternate along the last axis of one tensor."""

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return two leaves: the even columns and the odd columns."""
        (both,) = tensors
        return [both[..., 0::2], both[..., 1::2]]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return one tensor with the leaves' columns in alternation."""
        first, second = leaves
        return [np.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return two shapes with half of the last axis."""
        (both,) = shapes
        _require(bool(both) and both[-1] % 2 == 0, f"an even last axis, found shape {both}")
        return [(*both[:-1], both[-1] // 2)] * 2

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the leaves' shape with twice the last axis."""
        first, second = shapes
        _require(bool(first) and first == second, f"two equal shapes, found {list(shapes)}")
        return [(*first[:-1], 2 * first[-1])]

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the columns of the box, read with the other leaf's columns between them."""
        columns = slice(2 * box[-1].start + leaf, 2 * box[-1].stop - 1 + leaf)
        return BoxReads(((0, (*box[:-1], columns)),), lambda arrays: arrays[0][..., ::2])


@dataclass(frozen=True)
class Chain:
    """Operations one after the other; the first is applied to the tensors."""

    ops: tuple[Op, ...]

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the tensors after all operations, in order."""
        arrays = list(tensors)
        for op in self.ops:
            arrays = op.from_hf(arrays)
        return arrays

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return the leaves after the inverses of all operations, the last one first."""
        arrays = list(leaves)
        for op in reversed(self.ops):
            arrays = op.to_hf(arrays)
        return arrays

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes after all operations, in order."""
        for op in self.ops:
            shapes = op.leaf_shapes(shapes)
        return list(shapes)

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes after the inverses of all operations, the last one first."""
        for op in reversed(self.ops):
            shapes = op.tensor_shapes(shapes)
        return list(shapes)

    def box_reads(self, shapes: Sequence[Shape], leaf: int, box: Box) -> BoxReads:
        """Return the boxes to read for a leaf's box, traced back through all operations."""
        inputs = [list(shapes)]
        for op in self.ops[:-1]:
            inputs.append(op.leaf_shapes(inputs[-1]))
        return _chained(self.ops, inputs, leaf, box)


RENAME = Rename()
TRANSPOSE = Transpose()


def _first(arrays: Sequence[Array]) -> Array:
    return arrays[0]


def of_rows(tensor: int, rows: Array, box: Box) -> BoxReads:
    """Return `rows` of a tensor, in that order, inside `box`; all rows between are read too."""
    first = int(rows.min())
    between = slice(first, int(rows.max()) + 1)
    return BoxReads(((tensor, (between, *box[1:])),), lambda arrays: arrays[0][rows - first])


def _chained(ops: Sequence[Op], shapes: Sequence[Sequence[Shape]], leaf: int, box: Box) -> BoxReads:
    """Return what `Chain.box_reads` returns.

    Args:
        ops: the operations whose box is still to be traced back, first one first.
        shapes: input shapes of each operation.
        leaf: index of the leaf in the last operation's output.
        box: a box of that leaf.
    """
    reads = ops[-1].box_reads(shapes[-1], leaf, box)
    if len(ops) == 1:
        return reads
    inputs = [_chained(ops[:-1], shapes[:-1], number, inner) for number, inner in reads.reads]

    def make(arrays: Sequence[Array]) -> Array:
        rest = iter(arrays)
        return reads.make([inner.make([next(rest) for _ in inner.reads]) for inner in inputs])

    return BoxReads(tuple(read for inner in inputs for read in inner.reads), make)


def _require(condition: bool, expectation: str) -> None:
    if not condition:
        raise ValueError(expectation)
