"""NumPy-style indices, checked and made explicit for an array's shape. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import numpy as np

from cairn.storage.arrays.boxes import Box
from cairn.storage.errors import InvalidSliceError

__all__ = ["Index", "explicit_index", "permutation", "selected_box"]

_Part = int | np.integer[Any] | slice | EllipsisType
Index = _Part | tuple[_Part, ...]


def explicit_index(index: Index, shape: Sequence[int], *, path: object) -> tuple[int | slice, ...]:
    """Return one non-negative integer, or slice with bounds inside the array, per axis of `shape`.

    Raises:
        InvalidSliceError: the index has too many parts, a position outside, or a step below 1.
    """
    parts = index if isinstance(index, tuple) else (index,)
    rank = len(shape)
    if Ellipsis in parts:
        at = parts.index(Ellipsis)
        parts = (*parts[:at], *(slice(None),) * (rank - len(parts) + 1), *parts[at + 1 :])
    parts = (*parts, *(slice(None),) * (rank - len(parts)))
    where: list[int | slice] = []
    # A part that does not fit is left out; the check of the length below then raises.
    for part, size in zip(parts, shape, strict=False):
        if isinstance(part, slice) and (part.step is None or part.step > 0):
            start, stop, step = part.indices(size)
            # An empty slice such as 5:2 becomes 5:5: its length must not be negative.
            where.append(slice(start, max(start, stop), step))
        elif isinstance(part, int | np.integer) and -size <= part < size:
            where.append(int(part) % size)
    if len(where) != rank or len(parts) != rank:
        raise InvalidSliceError(
            "no such part",
            path=path,
            expected=f"up to {rank} integers or slices with positive steps within {tuple(shape)}",
            found=repr(index),
            next_step="Correct the index.",
        )
    return tuple(where)


def selected_box(index: Index, shape: Sequence[int], *, path: object) -> Box:
    """Return the box that `index` selects; an integer keeps its axis, with size 1.

    Raises:
        InvalidSliceError: `index` does not fit, or has a slice with a step.
    """
    parts = explicit_index(index, shape, path=path)
    box = tuple(slice(part, part + 1) if isinstance(part, int) else part for part in parts)
    if any(part.step not in (None, 1) for part in box):
        raise InvalidSliceError(
            "no box",
            path=path,
            expected=f"slices with step 1 within {tuple(shape)}",
            found=repr(index),
            next_step="Read parts with steps whole.",
        )
    return tuple(slice(part.start, part.stop) for part in box)


def permutation(transpose: bool | Sequence[int], rank: int, *, path: object) -> tuple[int, ...]:
    """Return the axes in the order of the result, for `np.transpose`.

    `transpose` is True for the reversed order, False for no change, or the order itself.

    Raises:
        InvalidSliceError: `transpose` is no permutation of the axes.
    """
    identity = tuple(range(rank))
    if isinstance(transpose, bool):
        return identity[::-1] if transpose else identity
    axes = tuple(transpose)
    if tuple(sorted(axes)) != identity:
        raise InvalidSliceError(
            "no such axes",
            path=path,
            expected=f"a permutation of {identity}",
            found=repr(axes),
            next_step="Correct the axes.",
        )
    return axes
