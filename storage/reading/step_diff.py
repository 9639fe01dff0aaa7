"""Differences of two steps: leaves by their digests, and values where those differ.

Values are compared as numbers: a NaN equals a NaN, and -0.0 equals 0.0, though their digests
differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from cairn.storage.arrays.dtypes import is_floating
from cairn.storage.arrays.leaf_paths import path_of
from cairn.storage.arrays.statistics import RunningStatistics, Statistics
from cairn.storage.reading.tensor_parts import TensorPart
from cairn.storage.runs.records.manifest import LeafRecord

__all__ = [
    "Change",
    "EntryDifference",
    "LeafDifference",
    "ValueDifference",
    "diff_entries",
    "diff_leaves",
    "diff_values",
    "has_counterparts",
]

Change = Literal["values", "dtype", "shape", "only_this", "only_other", "undigested"]

_TILE: Final = 1 << 16  # elements
_EXACT_BITS: Final = 32  # integers that float64 holds

_Numbers = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class LeafDifference:
    """Leaf that differs between two steps, or may differ.

    Attributes:
        item, path: item and path of the leaf.
        change: what differs: the `values`, with the same shape and dtype; the `dtype`, with the
            same shape; the `shape`; the leaf is in one step only; or unknown, since one of the two
            is `undigested`.
        this: the leaf in the one step; None if it is not there.
        other: the leaf in the other step; None if it is not there.
    """

    item: str
    path: str
    change: Change
    this: LeafRecord | None
    other: LeafRecord | None


@dataclass(frozen=True)
class ValueDifference:
    """Difference of a leaf's elements, other minus this.

    Attributes:
        differing: number of elements that differ.
        change: statistics of the differences of all elements, 0 where they are equal. For complex
            elements these are absolute differences.
        norm: norm of this leaf's elements.
    """

    differing: int
    change: Statistics
    norm: float | None

    @property
    def max_absolute(self) -> float | None:
        """Largest finite absolute difference; None if there is none."""
        least, most = self.change.min, self.change.max
        return None if least is None or most is None else float(max(-least, most))

    @property
    def relative(self) -> float | None:
        """Norm of the difference, divided by this leaf's norm; None if that is 0 or unknown."""
        return None if not self.norm or self.change.norm is None else self.change.norm / self.norm


def diff_leaves(
    this: Iterable[LeafRecord], other: Iterable[LeafRecord]
) -> tuple[list[LeafDifference], int]:
    """Return the leaves that differ or may differ, by item and path, and the number of equal ones.

    Args:
        this: leaves of the one step.
        other: leaves of the other.
    """
    these = {(leaf.item, leaf.path): leaf for leaf in this}
    others = {(leaf.item, leaf.path): leaf for leaf in other}
    differences, equal = [], 0
    for name in sorted({*these, *others}):
        change = _change(these.get(name), others.get(name))
        if change is None:
            equal += 1
        else:
            differences.append(LeafDifference(*name, change, these.get(name), others.get(name)))
    return differences, equal


def has_counterparts(change: Change) -> bool:
    """Return True if elements of a leaf with this change have counterparts in the other step."""
    return change in {"values", "dtype", "undigested"}


def diff_values(this: TensorPart, other: TensorPart) -> ValueDifference | None:
    """Return the difference of two leaves' values, computed in bounded memory.

    Returns:
        The difference; None for dtypes without common numbers. Different dtypes have common numbers
        only if both are floating or integers of at most 32 bits.

    Raises:
        ValueError: the shapes differ.
        CorruptionError: stored bytes are missing, fail their check or are not what was saved.
        StoreUnavailableError: the store gives no answer.
    """
    if this.shape != other.shape:
        raise ValueError(f"shapes {this.shape} and {other.shape}: expected the same")
    if this.dtype != other.dtype and not (_is_exact(this.dtype) and _is_exact(other.dtype)):
        return None
    complex_ = this.dtype.kind == "c"
    norm = RunningStatistics(np.dtype(np.float64) if complex_ else this.dtype)
    change = RunningStatistics(np.dtype(np.float64))
    differing = 0
    for these, others in _side_by_side(this.blocks(), other.blocks()):
        norm.add(np.abs(these).astype(np.float64) if complex_ else these)
        differs, far = _difference(these, others)
        differing += int(np.count_nonzero(differs))
        change.add(far)
    return ValueDifference(differing, change.result(), norm.result().norm)


def _change(this: LeafRecord | None, other: LeafRecord | None) -> Change | None:
    """Return what differs between two records; None if nothing does."""
    if other is None:
        return "only_this"
    if this is None:
        return "only_other"
    if this.shape != other.shape:
        return "shape"
    if this.dtype != other.dtype:
        return "dtype"
    if this.digest is None or other.digest is None:
        return "undigested"
    return None if this.digest == other.digest else "values"


def _is_exact(dtype: np.dtype[Any]) -> bool:
    """Return True if float64 holds every element of this dtype."""
    if dtype.kind == "c":
        return False
    return is_floating(dtype) or dtype.itemsize * 8 <= _EXACT_BITS


def _side_by_side(
    these: Iterator[_Numbers], others: Iterator[_Numbers]
) -> Iterator[tuple[_Numbers, _Numbers]]:
    """Yield pairs of blocks with the same elements of both, however each is cut into blocks."""
    left = right = np.zeros(0)
    while True:
        if not left.size:
            left = next(these, left).reshape(-1)
        if not right.size:
            right = next(others, right).reshape(-1)
        count = min(left.size, right.size, _TILE)
        if not count:
            return
        yield left[:count], right[:count]
        left, right = left[count:], right[count:]


def _difference(left: _Numbers, right: _Numbers) -> tuple[_Numbers, _Numbers]:
    """Return which elements differ, and by how much as float64: 0 where they do not."""
    whole = left.dtype == right.dtype and left.dtype.kind in "iu" and left.dtype.itemsize == 8
    with np.errstate(invalid="ignore", over="ignore"):
        if whole:
            differs = left != right
            # 64-bit integers are subtracted as integers, since float64 does not hold them;
            # unsigned, so that the difference of any two fits.
            up = (right.astype(np.uint64) - left.astype(np.uint64)).astype(np.float64)
            down = (left.astype(np.uint64) - right.astype(np.uint64)).astype(np.float64)
            return differs, np.where(right >= left, up, -down)
        wide = np.complex128 if left.dtype.kind == "c" else np.float64
        these, others = left.astype(wide), right.astype(wide)
        differs = (these != others) & ~(np.isnan(these) & np.isnan(others))
        far = others - these
        # Equal infinities, and two NaN, have the difference NaN.
        far[~differs] = 0
        return differs, np.abs(far) if wide is np.complex128 else far


@dataclass(frozen=True)
class EntryDifference:
    """Entry of JSON that differs between two steps.

    Attributes:
        path: the entry's keys joined by "/".
        change: whether its value differs, or it is in one step only.
        this: the entry in the one step; None also if it is not there.
        other: the entry in the other step; None also if it is not there.
    """

    path: str
    change: Literal["changed", "only_this", "only_other"]
    this: Any
    other: Any


def diff_entries(this: Mapping[str, Any], other: Mapping[str, Any]) -> list[EntryDifference]:
    """Return the entries of two JSON objects that differ, by path; a NaN equals a NaN.

    Objects are compared entry by entry, lists as a whole.
    """
    differences: list[EntryDifference] = []
    _diff_objects(this, other, (), differences)
    return differences


def _diff_objects(
    this: Mapping[str, Any],
    other: Mapping[str, Any],
    above: tuple[str, ...],
    differences: list[EntryDifference],
) -> None:
    for name in sorted({*this, *other}):
        left, right = this.get(name), other.get(name)
        keys = (*above, name)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            _diff_objects(left, right, keys, differences)
        elif name not in other:
            differences.append(EntryDifference(path_of(keys), "only_this", left, None))
        elif name not in this:
            differences.append(EntryDifference(path_of(keys), "only_other", None, right))
        elif not _are_equal(left, right):
            differences.append(EntryDifference(path_of(keys), "changed", left, right))


def _are_equal(this: Any, other: Any) -> bool:
    if type(this) is not type(other):
        return False
    if isinstance(this, Mapping):
        return this.keys() == other.keys() and all(
            _are_equal(this[name], other[name]) for name in this
        )
    if isinstance(this, list | tuple):
        return len(this) == len(other) and all(map(_are_equal, this, other))
    return bool(this == other or (this != this and other != other))
