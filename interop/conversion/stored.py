"""Stored leaves with operations, as a map declares them; and the operations for their shapes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from cairn.counts import count_text
from cairn.interop.conversion.inverses import Each, Inverse
from cairn.interop.conversion.layout_ops import Merge, Pad, Permute, Unstack
from cairn.interop.conversion.leaf_patterns import LeafPattern
from cairn.interop.conversion.ops import RENAME, TRANSPOSE, Chain, Op, Shape, Split, Stack
from cairn.interop.conversion.value_ops import Plus, Times
from cairn.interop.errors import ArgumentError

__all__ = ["Step", "Stored", "operation", "other_names"]

Step = tuple[str, tuple[Any, ...]]
"""Name of an operation, and its numbers."""


class Stored:
    """Stored leaves, and the operations that make leaves of the target from them, in order.

    Operations that need no number from the map take it from the stored shapes. Each reads only the
    boxes of stored leaves that a process's shards need.
    """

    def __init__(self, *paths: str) -> None:
        """Name the leaves.

        Args:
            *paths: patterns of stored paths, "item/path", with placeholders: "{layer}" stands for
                a segment or a part of one, "{path:path}" for any number of segments.

        Raises:
            ArgumentError: no path, or one that is malformed.
        """
        if not paths:
            raise ArgumentError(path="Stored", expected="at least one path", found="none")
        self.patterns = tuple(map(LeafPattern, paths))
        self.steps: tuple[Step, ...] = ()
        self.casts = False
        names = {pattern.names for pattern in self.patterns}
        if len(names) > 1:
            raise other_names("Stored", paths)

    def __repr__(self) -> str:
        """Return the calls that make this object."""
        calls = [f"Stored({', '.join(repr(pattern.text) for pattern in self.patterns)})"]
        calls += [f"{name}{numbers!r}" for name, numbers in self.steps]
        return ".".join([*calls, *(["cast()"] if self.casts else [])])

    def stack(self, axis: int = 0) -> Stored:
        """Stack leaves along a new axis: [a, b] * count -> [a, count, b] with `axis=1`.

        The leaves are those that differ in a placeholder which the target lacks, such as "{layer}",
        in the order of its numbers; without such a placeholder all of `paths`.
        """
        return self._with("stack", axis)

    def unstack(self, axis: int = 0) -> Stored:
        """Make a leaf of each index of an axis: [count, a, b] -> [a, b] * count.

        The leaves are those that differ in a placeholder of the target which the stored path
        lacks, in the order of its numbers; without such a placeholder those that the map names.
        """
        return self._with("unstack", axis)

    def split(self, *sizes: int, axis: int = 0) -> Stored:
        """Split a leaf along an axis into leaves of these sizes: [a + b, c] -> [a, c], [b, c]."""
        return self._with("split", axis, *sizes)

    def concatenate(self, axis: int = 0) -> Stored:
        """Join leaves along an axis, in the order of `paths`: [a, c], [b, c] -> [a + b, c]."""
        return self._with("concatenate", axis)

    def transpose(self, *axes: int) -> Stored:
        """Permute the axes as `numpy.transpose` does; without `axes`, swap the last two."""
        return self._with("transpose", *axes)

    def reshape(self, *shape: int) -> Stored:
        """Reshape each leaf, in C order; -1 stands for the length that follows from the others."""
        return self._with("reshape", *shape)

    def pad(self, size: int, axis: int = 0) -> Stored:
        """Lengthen an axis to `size`; what is new is zero."""
        return self._with("pad", size, axis)

    def cut(self, size: int, axis: int = 0) -> Stored:
        """Shorten an axis to `size`; what is beyond is not loaded."""
        return self._with("cut", size, axis)

    def scale(self, number: float) -> Stored:
        """Multiply by a number; computed in float32 at least, and rounded once."""
        return self._with("scale", number)

    def add(self, number: float) -> Stored:
        """Add a number, such as 1.0 where norms store `w - 1`."""
        return self._with("add", number)

    def cast(self) -> Stored:
        """Allow another dtype than the stored one: each leaf gets the dtype of its target."""
        changed = self._with()
        changed.casts = True
        return changed

    @property
    def computes(self) -> bool:
        """True if an operation changes numbers, which must be floating."""
        return any(name in ("scale", "add") for name, _ in self.steps)

    def _with(self, *step: Any) -> Stored:
        changed = Stored(*(pattern.text for pattern in self.patterns))
        changed.steps, changed.casts = self.steps, self.casts
        if step:
            changed.steps += ((step[0], step[1:]),)
        return changed


def other_names(argument: str, paths: Iterable[str]) -> ArgumentError:
    """Return the error for paths that are named together and have different placeholders."""
    return ArgumentError(
        path=argument,
        expected="the same placeholders in all paths that are named together",
        found=", ".join(map(repr, paths)),
    )


def operation(steps: Sequence[Step], shapes: Sequence[Shape], layers: int | None) -> Op:
    """Return the operations of a rule for stored leaves of these shapes.

    Raises:
        ValueError: they can't take such leaves.
    """
    ops: list[Op] = []
    for name, numbers in steps:
        op = _op(name, numbers, shapes, layers)
        if name == "stack":
            layers = None
        shapes = op.leaf_shapes(shapes)
        ops.append(op)
    return _one(ops)


def _op(name: str, numbers: tuple[Any, ...], shapes: Sequence[Shape], layers: int | None) -> Op:
    """Return an operation for leaves of these shapes; `layers` of them are stacked, None: all."""
    first = shapes[0]
    match name:
        case "stack":
            count = layers or len(shapes)
            return _each(Stack(count, _axis(numbers[0], len(first) + 1)), len(shapes) // count)
        case "unstack":
            axis = _axis(numbers[0], len(first))
            return _each(Unstack(first[axis], axis), len(shapes))
        case "split":
            axis, *sizes = numbers
            return _each(Split(tuple(sizes), _axis(axis, len(first))), len(shapes))
        case "concatenate":
            axis = _axis(numbers[0], len(first))
            if any(len(shape) != len(first) for shape in shapes):
                raise ValueError(f"shapes with as many axes, found {list(shapes)}")
            return Inverse(Split(tuple(shape[axis] for shape in shapes), axis))
        case "transpose":
            if not numbers:
                return TRANSPOSE
            axes = tuple(_axis(axis, len(first)) for axis in numbers)
            if sorted(axes) != [*range(len(first))]:
                raise ValueError(f"each axis of shape {first} once, found axes {numbers}")
            return Permute(axes)
        case "reshape":
            return _reshape(first, numbers)
        case "pad" | "cut":
            size, axis = numbers[0], _axis(numbers[1], len(first))
            if (size < first[axis]) if name == "pad" else (size > first[axis]):
                raise ValueError(f"axis {axis} to {name} to {size}, found shape {first}")
            pad = Pad(min(size, first[axis]), max(size, first[axis]), axis)
            return Inverse(pad) if name == "pad" else pad
        case "scale":
            return Inverse(Times(numbers[0]))
        case _:
            return Inverse(Plus(numbers[0]))


def _reshape(shape: Shape, lengths: tuple[int, ...]) -> Op:
    """Return a reshape as axes that are merged, and merged axes that are split.

    Raises:
        ValueError: the shapes have another number of elements, or one of them no axis.
    """
    count = math.prod(shape)
    if -1 in lengths:
        others = math.prod(length for length in lengths if length != -1)
        lengths = tuple(count // others if n == -1 and others else n for n in lengths)
    if min(lengths, default=0) < 1 or not shape or math.prod(lengths) != count:
        raise ValueError(f"a shape of {count_text(count, 'element')}, found {lengths} for {shape}")
    groups: list[tuple[list[int], list[int]]] = []
    before, after = [*shape], [*lengths]
    while before and after:
        left, right = [before.pop(0)], [after.pop(0)]
        while math.prod(left) != math.prod(right):
            if math.prod(left) < math.prod(right):
                left.append(before.pop(0))
            else:
                right.append(after.pop(0))
        groups.append((left, right))
    groups[-1][0].extend(before)  # axes of length 1
    groups[-1][1].extend(after)
    ops: list[Op] = []
    axis = 0
    for left, right in groups:
        ops += [Merge(tuple(left), axis)] if len(left) > 1 else []
        ops += [Inverse(Merge(tuple(right), axis))] if len(right) > 1 else []
        axis += len(right)
    return _one(ops)


def _one(ops: Sequence[Op]) -> Op:
    if not ops:
        return RENAME
    return ops[0] if len(ops) == 1 else Chain(tuple(ops))


def _each(op: Op, groups: int) -> Op:
    return op if groups == 1 else Each(op, groups)


def _axis(axis: int, count: int) -> int:
    if not -count <= axis < count:
        raise ValueError(f"an axis below {count}, found {axis}")
    return axis % count
