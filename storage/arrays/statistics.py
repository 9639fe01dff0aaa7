"""Statistics of an array whose elements come block by block, in one pass. Imports no JAX.

Tiles are joined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances" (1979), sums as fractions: nothing overflows, and those of integers are
exact. Elements of at most 16 bits are counted by their bits, which says everything about them.

A histogram's bins are as wide as a power of two and begin at a multiple of it: where the range
grows, bins are put together, and no element is looked at again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import ml_dtypes
import numpy as np

from cairn.storage.arrays.dtypes import is_floating

__all__ = ["MOST_BINS", "Histogram", "RunningStatistics", "Statistics"]

MOST_BINS: Final = 64

_TILE: Final = 1 << 15  # elements: as float64 they stay in a core's cache
_FAR: Final = 300  # numbers beyond 2**300, or below its inverse, are scaled, then squared
_FACTORS: Final = {4: 120, 8: 1000}  # by size: up to here a float holds 2**n and its inverse
_TOGETHER: Final = 64  # tiles
_BYTE: Final = 256

_Numbers = np.ndarray[Any, np.dtype[Any]]
_Real = int | float


@dataclass(frozen=True)
class Histogram:
    """How many elements lie where.

    Attributes:
        start: where the first bin begins; infinite if that is beyond float64.
        width: of each bin. It holds what is not less than its beginning, and less than its end; 0
            with one bin says that all are `start`.
        counts: elements of each bin, of which there are at most 64.
    """

    start: _Real
    width: _Real
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Statistics:
    """Of the elements of an array.

    Attributes:
        count: of all of them.
        nan, positive_infinity, negative_infinity: how many are that. All below is without them.
        zeros: how many are 0.
        min, max: exact; None if no element is finite.
        mean: of integers rounded once.
        std: of the whole population: the squares are divided by how many elements there are.
        norm: square root of the sum of squares; infinite if that is beyond float64.
        histogram: None if no element is finite.
    """

    count: int
    nan: int
    positive_infinity: int
    negative_infinity: int
    zeros: int
    min: _Real | None
    max: _Real | None
    mean: float | None
    std: float | None
    norm: float | None
    histogram: Histogram | None


class RunningStatistics:
    """The statistics of what was added so far."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        """Of elements of this dtype: bool, integers or floating, with those of `ml_dtypes`.

        Raises:
            TypeError: it is none of these.
        """
        self._floating = is_floating(dtype)
        if not (self._floating or dtype == np.bool_ or _is_integer(dtype)):
            raise TypeError(f"{dtype.name}: expected bool, integers or floating numbers")
        self._dtype = dtype
        self._sums = _Sums()
        self._by_bits: _Numbers | None = None
        if dtype.itemsize <= 2:
            self._by_bits = np.zeros(1 << 8 * dtype.itemsize, np.int64)

    def add(self, block: _Numbers) -> None:
        """Elements, in whatever order and shape.

        Raises:
            TypeError: they are of another dtype.
        """
        if block.dtype != self._dtype:
            raise TypeError(f"a block of {block.dtype.name}: expected {self._dtype.name}")
        flat = np.ascontiguousarray(block).reshape(-1)
        if self._by_bits is None:
            for start in range(0, flat.size, _TILE):
                self._sums.add(flat[start : start + _TILE], None, floating=self._floating)
            return
        bits = flat.view(f"u{self._dtype.itemsize}")
        for start in range(0, bits.size, _TILE):
            _count(self._by_bits, bits[start : start + _TILE])

    def result(self) -> Statistics:
        """Of all of it."""
        if self._by_bits is None:
            return self._sums.result()
        sums, found = _Sums(), np.flatnonzero(self._by_bits)
        if found.size:
            values = found.astype(f"u{self._dtype.itemsize}").view(self._dtype)
            plain = _as_float64(values) if self._floating else values.astype(np.int64)
            sums.add(plain, self._by_bits[found], floating=self._floating)
        return sums.result()


class _Sums:
    """What is known of some numbers."""

    def __init__(self) -> None:
        self._count = self._nan = self._above = self._below = self._zeros = 0
        self._finite = self._joined = 0
        self._tiles: list[tuple[int, float, float]] = []  # count, sum and squares of each
        self._least: _Real = 0
        self._most: _Real = 0
        self._sum = Fraction(0)
        self._squares = 0.0  # of the distances from the mean, in units of 4**exponent
        self._exponent = 0
        self._bins = _Bins()

    def add(self, values: _Numbers, weights: _Numbers | None, *, floating: bool) -> None:
        """Numbers, at least one, each as often as its weight says."""
        self._count += _weight(weights, values.size)
        least, most = values.min().item(), values.max().item()
        if floating and not (math.isfinite(least) and math.isfinite(most)):
            values, weights = self._finite_of(values, weights)
            if not values.size:
                return
            least, most = values.min().item(), values.max().item()
        count = _weight(weights, values.size)
        if floating:
            self._join_floats(values, weights, count, max(-least, most))
        else:
            self._join_integers(values, weights, count, least)
        self._least = min(self._least, least) if self._finite else least
        self._most = max(self._most, most) if self._finite else most
        self._finite += count
        self._zeros += _weight_where(values == 0, weights)
        self._bins.add(values, weights, self._least, self._most)

    def result(self) -> Statistics:
        """Of all of them."""
        self._join_tiles()
        known = self._finite > 0
        mean = self._sum / self._finite if known else Fraction(0)
        squares = Fraction(self._squares) * Fraction(4) ** self._exponent
        return Statistics(
            count=self._count,
            nan=self._nan,
            positive_infinity=self._above,
            negative_infinity=self._below,
            zeros=self._zeros,
            min=self._least if known else None,
            max=self._most if known else None,
            mean=float(mean) if known else None,
            std=_root(squares / self._finite) if known else None,
            norm=_root(squares + self._sum * mean) if known else None,
            histogram=self._bins.result() if known else None,
        )

    def _finite_of(
        self, values: _Numbers, weights: _Numbers | None
    ) -> tuple[_Numbers, _Numbers | None]:
        """Those that are finite; the others are counted."""
        self._nan += _weight_where(np.isnan(values), weights)
        self._above += _weight_where(values == math.inf, weights)
        self._below += _weight_where(values == -math.inf, weights)
        finite = np.isfinite(values)
        return values[finite], None if weights is None else weights[finite]

    def _join_floats(
        self, values: _Numbers, weights: _Numbers | None, count: int, largest: float
    ) -> None:
        size = math.frexp(largest)[1]
        exponent = size if largest and abs(size) > _FAR else 0
        wide = _as_float64(values)
        if exponent:
            wide = np.ldexp(wide, -exponent)
        total = wide.sum() if weights is None else (wide * weights).sum()
        far = np.subtract(wide, total / count, out=None if wide is values else wide)
        squares = _sum_of_squares(far, weights)
        if exponent:
            self._join(Fraction(total.item()) * Fraction(2) ** exponent, count)
            self._add_squares(squares, exponent)
            return
        self._tiles.append((count, total.item(), squares))
        if len(self._tiles) >= _TOGETHER:
            self._join_tiles()

    def _join_tiles(self) -> None:
        """Join ordinary tiles: many at once, since fractions take their time."""
        if not self._tiles:
            return
        counts, totals, squares = np.array(self._tiles).T
        self._tiles.clear()
        count, total = counts.sum(), totals.sum()
        apart = totals / counts - total / count
        self._join(Fraction(total.item()), int(count))
        self._add_squares(float(squares.sum() + (counts * apart * apart).sum()), 0)

    def _join_integers(
        self, values: _Numbers, weights: _Numbers | None, count: int, least: int
    ) -> None:
        above = _above(values, least)
        if weights is None:  # in halves: the sum of a tile of these is an integer of 64 bits
            total = (int((above >> 32).sum()) << 32) + int((above & 0xFFFFFFFF).sum())
        else:
            total = int((above.astype(np.int64) * weights).sum())
        squares = _sum_of_squares(above.astype(np.float64) - total / count, weights)
        self._join(Fraction(total + least * count), count)
        self._add_squares(squares, 0)

    def _join(self, total: Fraction, count: int) -> None:
        """Add the sum of numbers, and what their mean's distance adds to the squares."""
        if self._joined:
            apart = total / count - self._sum / self._joined
            size = max(apart.numerator.bit_length() - apart.denominator.bit_length(), -_FACTORS[8])
            exponent = size if apart and abs(size) > _FAR else 0
            distance = float(apart / Fraction(2) ** exponent)
            both = count * self._joined / (count + self._joined)
            self._add_squares(distance * distance * both, exponent)
        self._sum += total
        self._joined += count

    def _add_squares(self, squares: float, exponent: int) -> None:
        """In units of 4**exponent; what is too small beside the others to tell adds nothing."""
        if not squares:
            return
        if not self._squares:
            self._squares, self._exponent = squares, exponent
            return
        common = max(exponent, self._exponent)
        kept = math.ldexp(self._squares, 2 * (self._exponent - common))
        self._squares = kept + math.ldexp(squares, 2 * (exponent - common))
        self._exponent = common


class _Bins:
    """A histogram whose bins widen with the range of what is added.

    While all numbers are one there are no bins yet.
    """

    def __init__(self) -> None:
        self._same: tuple[_Real, int] = (0, 0)
        self._range: tuple[_Real, _Real] | None = None
        self._exponent = 0
        self._first = 0
        self._counts = np.zeros(MOST_BINS, np.int64)
        self._pairs = np.zeros(MOST_BINS * _BYTE, np.int64)  # of bins of numbers side by side

    def add(self, values: _Numbers, weights: _Numbers | None, least: _Real, most: _Real) -> None:
        """Finite numbers, and the range of these and of all before."""
        if least == most:
            self._same = (least, self._same[1] + _weight(weights, values.size))
            return
        if self._range != (least, most):
            self._unpair()
            self._widen(least, most)
        places = _bins_of(values, self._exponent, self._first)
        if weights is not None:
            self._counts += np.bincount(places, weights, MOST_BINS).astype(np.int64)
            return
        _count(self._pairs, places[: places.size // 2 * 2].view(np.uint16))
        if places.size % 2:
            self._counts[places[-1]] += 1

    def _unpair(self) -> None:
        pairs = self._pairs.reshape(MOST_BINS, _BYTE)
        self._counts += pairs.sum(0)[:MOST_BINS] + pairs.sum(1)
        self._pairs[:] = 0

    def result(self) -> Histogram:
        """Of all of it."""
        self._unpair()
        if self._range is None:
            return Histogram(self._same[0], 0, (self._same[1],))
        last = int(np.flatnonzero(self._counts)[-1])
        width = Fraction(2) ** self._exponent
        plain = int if isinstance(self._range[0], int) else _as_float
        counts = tuple(self._counts[: last + 1].tolist())
        return Histogram(plain(self._first * width), plain(width), counts)

    def _widen(self, least: _Real, most: _Real) -> None:
        """Take the narrowest bins that hold the range."""
        old, before, counted = self._exponent, self._first, self._counts.tolist()
        if self._range is None:
            self._exponent = _too_narrow(least, most)
        while _bin_of(most, self._exponent) - _bin_of(least, self._exponent) >= MOST_BINS:
            self._exponent += 1
        self._first = _bin_of(least, self._exponent)
        self._counts = np.zeros(MOST_BINS, np.int64)
        if self._range is None:
            value, count = self._same
            if count:
                self._counts[_bin_of(value, self._exponent) - self._first] = count
        for place, count in enumerate(counted if self._range else ()):
            moved = (before + place >> self._exponent - old) - self._first
            if count:
                self._counts[moved] += count
        self._range = (least, most)


def _is_integer(dtype: np.dtype[Any]) -> bool:
    try:
        ml_dtypes.iinfo(dtype)
    except ValueError:
        return False
    return True


def _as_float64(values: _Numbers) -> _Numbers:
    with np.errstate(invalid="ignore"):  # a NaN may be a signaling one
        return values.astype(np.float64, copy=False)


def _weight(weights: _Numbers | None, size: int) -> int:
    return size if weights is None else int(weights.sum())


def _weight_where(those: _Numbers, weights: _Numbers | None) -> int:
    return int(np.count_nonzero(those)) if weights is None else int(weights[those].sum())


def _sum_of_squares(values: _Numbers, weights: _Numbers | None) -> float:
    # Not by a dot product: its library's threads stand in each other's way on a busy machine.
    squares = values * values
    return float((squares if weights is None else squares * weights).sum())


def _above(values: _Numbers, least: int) -> _Numbers:
    """By how much integers are above one that none is below, as uint64."""
    return values.astype(np.uint64) - np.uint64(least % (1 << 64))


def _too_narrow(least: _Real, most: _Real) -> int:
    """Exponent of a width with which a range has too many bins; integers' are not below 1."""
    span = Fraction(most) - Fraction(least)
    size = span.numerator.bit_length() - span.denominator.bit_length()
    return max(size - 8, 0) if isinstance(least, int) else size - 8


def _bin_of(value: _Real, exponent: int) -> int:
    return math.floor(Fraction(value) / Fraction(2) ** exponent)


def _bins_of(values: _Numbers, exponent: int, first: int) -> _Numbers:
    """The bins that numbers are in, counted from the first, as uint8."""
    if values.dtype.kind != "f":
        return (_above(values, first << exponent) >> np.uint64(exponent)).astype(np.uint8)
    if abs(exponent) <= _FACTORS[values.dtype.itemsize]:
        scaled: _Numbers = values * values.dtype.type(2.0**-exponent)
    else:
        scaled = np.ldexp(_as_float64(values), -exponent)
    np.floor(scaled, out=scaled)
    if exponent > 0:  # what is below 0, and so little that it became 0
        np.copyto(scaled, -1, where=(values < 0) & (scaled == 0))
    scaled -= scaled.dtype.type(first)
    places: _Numbers = scaled.astype(np.uint8)
    return places


def _count(counts: _Numbers, numbers: _Numbers) -> None:
    """Add how often there is each of some whole numbers below how many counts there are."""
    # Of what stays in the cache, and in place: `bincount` makes all counts anew each time.
    np.add.at(counts, numbers.astype(np.intp), 1)


def _as_float(number: Fraction) -> float:
    """Rounded; infinite if it is beyond float64, as the beginning of the first bin may be."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _root(square: Fraction) -> float:
    """The square root; infinite if no float64 is so large."""
    if not square:
        return 0.0
    half = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(square / Fraction(4) ** half), half)
    except OverflowError:
        return math.inf
