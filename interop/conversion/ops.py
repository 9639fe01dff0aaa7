"""Invertible operations between tensors of another format and leaves of ours.

NumPy only. An operation works on the tensors of one rule, so memory is bounded by the largest rule
and not by the model; shapes are known without touching numbers. `part` tells which boxes of their
tensors make a box of ours, so that a process reads no more than its devices hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cairn.interop.conversion.parts import Box, Part, common, shifted, whole_box

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]


class Op(Protocol):
    """Invertible operation from tensors of theirs to leaves of ours."""

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Return our leaves, made of their tensors."""
        ...

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Return their tensors, made of our leaves: the exact inverse of `to_ours`."""
        ...

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of `to_ours`'s result; ValueError if theirs don't fit."""
        ...

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of `to_theirs`'s result; ValueError if ours don't fit."""
        ...

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return how to make a box of one of our leaves; by default from all of their tensors.

        Args:
            theirs: shapes of their tensors.
            leaf: index of the leaf in the result of `to_ours`.
            box: of that leaf; not empty.
        """
        reads = tuple((number, whole_box(shape)) for number, shape in enumerate(theirs))
        return Part(reads, lambda arrays: self.to_ours(arrays)[leaf][box])


@dataclass(frozen=True)
class Rename:
    """Numbers as they are, under another name."""

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Return their tensors as they are."""
        return list(theirs)

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Return our leaves as they are."""
        return list(ours)

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        return list(theirs)

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        return list(ours)

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return the box of the tensor itself."""
        return Part(((leaf, box),), _first)


@dataclass(frozen=True)
class Transpose:
    """Swap of the last two axes: PyTorch keeps [out, in], we keep [in, out]."""

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Return each tensor with its last two axes swapped."""
        return [np.swapaxes(array, -1, -2) for array in theirs]

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Return each leaf with its last two axes swapped."""
        return self.to_ours(ours)

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return each shape with its last two axes swapped."""
        for shape in theirs:
            _require(len(shape) >= 2, f"at least 2 axes to transpose, found shape {shape}")
        return [(*shape[:-2], shape[-1], shape[-2]) for shape in theirs]

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return each shape with its last two axes swapped."""
        return self.our_shapes(ours)

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return the box with its last two axes swapped."""
        swapped = (*box[:-2], box[-1], box[-2])
        return Part(((leaf, swapped),), lambda arrays: np.swapaxes(arrays[0], -1, -2))


@dataclass(frozen=True)
class Split:
    """Split of a fused tensor of theirs into leaves of ours, `sizes` long along `axis`."""

    sizes: tuple[int, ...]
    axis: int = 0

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Split the tensor."""
        (fused,) = theirs
        return list(np.split(fused, np.cumsum(self.sizes)[:-1], axis=self.axis))

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Join the leaves."""
        return [np.concatenate(list(ours), axis=self.axis)]

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return one shape for each size."""
        (fused,) = theirs
        _require(
            len(fused) > self.axis and fused[self.axis] == sum(self.sizes),
            f"axis {self.axis} of {fused} to be {' + '.join(map(str, self.sizes))}",
        )
        return [(*fused[: self.axis], n, *fused[self.axis + 1 :]) for n in self.sizes]

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return the joined shape."""
        found = [shape[self.axis] if len(shape) > self.axis else None for shape in ours]
        rest = {(*shape[: self.axis], *shape[self.axis + 1 :]) for shape in ours}
        _require(
            found == list(self.sizes) and len(rest) == 1,
            f"axis {self.axis} to be {list(self.sizes)} long, found shapes {list(ours)}",
        )
        first = ours[0]
        return [(*first[: self.axis], sum(self.sizes), *first[self.axis + 1 :])]

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return the box, shifted to where the leaf begins in the fused tensor."""
        return Part(((0, shifted(box, self.axis, sum(self.sizes[:leaf]))),), _first)


@dataclass(frozen=True)
class Fuse:
    """Join of several tensors of theirs into one leaf of ours, along `axis`."""

    sizes: tuple[int, ...]
    axis: int = 0

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Join the tensors."""
        return Split(self.sizes, self.axis).to_theirs(theirs)

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Split the leaf."""
        return Split(self.sizes, self.axis).to_ours(ours)

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return the joined shape."""
        return Split(self.sizes, self.axis).their_shapes(theirs)

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return one shape for each size."""
        return Split(self.sizes, self.axis).our_shapes(ours)

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return the overlap of the box with each tensor that it reaches into."""
        reads, start = [], 0
        for number, shape in enumerate(theirs):
            shared = common(shifted(box, self.axis, -start), whole_box(shape))
            reads += [] if shared is None else [(number, shared)]
            start += self.sizes[number]
        return Part(tuple(reads), lambda arrays: np.concatenate(list(arrays), axis=self.axis))


@dataclass(frozen=True)
class Stack:
    """Stack of `count` tensors of theirs (such as experts) into one leaf with a leading axis."""

    count: int

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Stack the tensors."""
        return [np.stack(list(theirs))]

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Return the leaf's entries along its leading axis."""
        (stacked,) = ours
        return list(stacked)

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return the stacked shape."""
        _require(
            len(theirs) == self.count and len(set(theirs)) == 1,
            f"{self.count} tensors of one shape, found shapes {list(theirs)}",
        )
        return [(self.count, *theirs[0])]

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return one shape for each tensor."""
        (stacked,) = ours
        _require(
            len(stacked) >= 1 and stacked[0] == self.count,
            f"leading axis {self.count}, found shape {stacked}",
        )
        return [stacked[1:]] * self.count

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return the inner box of each tensor that the box covers."""
        numbers, inner = box[0], box[1:]
        reads = tuple((number, inner) for number in range(numbers.start, numbers.stop))
        return Part(reads, lambda arrays: np.stack(list(arrays)))


@dataclass(frozen=True)
class RotaryRows:
    """Order of each head's rotated rows: x0 y0 x1 y1 ... in theirs, x0 x1 ... y0 y1 ... in ours.

    Code that rotates neighbouring pairs stores them so; ours rotates across two halves.

    Attributes:
        heads: heads that follow each other along the leading axis.
        start: first rotated row of each head.
        turning: number of rotated rows; None: all from `start` on.
    """

    heads: int
    start: int = 0
    turning: int | None = None

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Return rows in halves."""
        return [self._reorder(array, halves=True) for array in theirs]

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Return rows interleaved."""
        return [self._reorder(array, halves=False) for array in ours]

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        for shape in theirs:
            divides = bool(shape) and shape[0] % self.heads == 0
            rows = shape[0] // self.heads if divides else 0
            turning = rows - self.start if self.turning is None else self.turning
            _require(
                rows > 0 and turning > 0 and turning % 2 == 0 and self.start + turning <= rows,
                f"rows to divide by 2 x {self.heads} heads, found shape {shape}",
            )
        return list(theirs)

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return the shapes unchanged."""
        return self.our_shapes(ours)

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return all rows from the first to the last that the box takes."""
        order = self._reorder(np.arange(theirs[leaf][0]), halves=True)
        return _of_rows(leaf, order[box[0]], box)

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
    """Split of a fused tensor with groups of rows; each group has `sizes` rows of leaf after leaf.

    A leaf of ours has its rows of all groups.
    """

    groups: int
    sizes: tuple[int, ...]

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Split the tensor; each leaf takes its rows of all groups."""
        (fused,) = theirs
        grouped = fused.reshape(self.groups, -1, *fused.shape[1:])
        pieces = np.split(grouped, np.cumsum(self.sizes)[:-1], axis=1)
        return [piece.reshape(-1, *fused.shape[1:]) for piece in pieces]

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Join the leaves group by group."""
        rest = ours[0].shape[1:]
        grouped = [array.reshape(self.groups, -1, *rest) for array in ours]
        return [np.concatenate(grouped, axis=1).reshape(-1, *rest)]

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return one shape for each size."""
        (fused,) = theirs
        _require(
            bool(fused) and fused[0] == self.groups * sum(self.sizes),
            f"axis 0 of {fused} to be {self.groups} x ({' + '.join(map(str, self.sizes))})",
        )
        return [(self.groups * size, *fused[1:]) for size in self.sizes]

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return the joined shape."""
        rows = [shape[0] if shape else None for shape in ours]
        wanted = [self.groups * size for size in self.sizes]
        _require(
            rows == wanted and len({shape[1:] for shape in ours}) == 1,
            f"axis 0 to be {wanted} long, found shapes {list(ours)}",
        )
        return [(sum(wanted), *ours[0][1:])]

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return all rows from the first to the last that the box takes, other leaves' too."""
        ((total, *_),) = theirs
        start = sum(self.sizes[:leaf])
        grouped = np.arange(total).reshape(self.groups, -1)[:, start : start + self.sizes[leaf]]
        return _of_rows(0, grouped.reshape(-1)[box[0]], box)


@dataclass(frozen=True)
class Interleaved:
    """Two leaves of ours that alternate along the last axis of one tensor of theirs."""

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Return the even columns, and the odd ones."""
        (both,) = theirs
        return [both[..., 0::2], both[..., 1::2]]

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Return the leaves' columns in turns."""
        first, second = ours
        return [np.stack([first, second], axis=-1).reshape(*first.shape[:-1], -1)]

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return half of the last axis for each."""
        (both,) = theirs
        _require(bool(both) and both[-1] % 2 == 0, f"an even last axis, found shape {both}")
        return [(*both[:-1], both[-1] // 2)] * 2

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return twice the last axis."""
        first, second = ours
        _require(bool(first) and first == second, f"two equal shapes, found {list(ours)}")
        return [(*first[:-1], 2 * first[-1])]

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Return the columns of both leaves, from the first that the box takes to the last."""
        columns = slice(2 * box[-1].start + leaf, 2 * box[-1].stop - 1 + leaf)
        return Part(((0, (*box[:-1], columns)),), lambda arrays: arrays[0][..., ::2])


@dataclass(frozen=True)
class Chain:
    """Operations one after the other, the first one nearest to theirs."""

    ops: tuple[Op, ...]

    def to_ours(self, theirs: Sequence[Array]) -> list[Array]:
        """Apply all operations, in order."""
        arrays = list(theirs)
        for op in self.ops:
            arrays = op.to_ours(arrays)
        return arrays

    def to_theirs(self, ours: Sequence[Array]) -> list[Array]:
        """Undo all operations, last first."""
        arrays = list(ours)
        for op in reversed(self.ops):
            arrays = op.to_theirs(arrays)
        return arrays

    def our_shapes(self, theirs: Sequence[Shape]) -> list[Shape]:
        """Return the shapes after all operations, in order."""
        shapes = list(theirs)
        for op in self.ops:
            shapes = op.our_shapes(shapes)
        return shapes

    def their_shapes(self, ours: Sequence[Shape]) -> list[Shape]:
        """Return the shapes before all operations, last first."""
        shapes = list(ours)
        for op in reversed(self.ops):
            shapes = op.their_shapes(shapes)
        return shapes

    def part(self, theirs: Sequence[Shape], leaf: int, box: Box) -> Part:
        """Trace the box back through all operations."""
        shapes = [list(theirs)]
        for op in self.ops[:-1]:
            shapes.append(op.our_shapes(shapes[-1]))
        return _chained(self.ops, shapes, leaf, box)


RENAME = Rename()
TRANSPOSE = Transpose()


def _first(arrays: Sequence[Array]) -> Array:
    return arrays[0]


def _of_rows(tensor: int, rows: Array, box: Box) -> Part:
    """Return a part of some rows, in their order; it also reads the rows between them."""
    first = int(rows.min())
    between = slice(first, int(rows.max()) + 1)
    return Part(((tensor, (between, *box[1:])),), lambda arrays: arrays[0][rows - first])


def _chained(ops: Sequence[Op], shapes: Sequence[Sequence[Shape]], leaf: int, box: Box) -> Part:
    """Compute `Chain.part`.

    Args:
        ops: those up to the one that makes the leaf.
        shapes: input shapes of each of them.
        leaf: number of the leaf.
        box: of it.
    """
    part = ops[-1].part(shapes[-1], leaf, box)
    if len(ops) == 1:
        return part
    before = [_chained(ops[:-1], shapes[:-1], number, inner) for number, inner in part.reads]

    def make(arrays: Sequence[Array]) -> Array:
        rest = iter(arrays)
        return part.make([one.make([next(rest) for _ in one.reads]) for one in before])

    return Part(tuple(read for one in before for read in one.reads), make)


def _require(condition: bool, expectation: str) -> None:
    if not condition:
        raise ValueError(expectation)
