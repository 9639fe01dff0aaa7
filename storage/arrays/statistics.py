"""Statistics of an array in one pass over its blocks.

Tiles of a block are combined as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
algorithm for computing sample variances" (1979), with sums as fractions: nothing overflows, and
sums of integers are exact. Elements of at most 16 bits are counted by bit pattern, which determines
all statistics.

A histogram's bins have a power of two as their width and start at a multiple of it: when the range
grows, bins merge, and no element is read again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

import ml_dtypes
import numpy as np

from cairn.storage.arrays.dtypes import is_floating

__all__ = ["MAX_BINS", "Histogram", "RunningStatistics", "Statistics"]

MAX_BINS: Final = 64

_TILE: Final = 1 << 15  # elements: as float64 they fit a core's cache
_FAR: Final = 300  # scale numbers beyond 2**300 or below 2**-300 before squaring
_FACTORS: Final = {4: 120, 8: 1000}  # by itemsize: up to this n a float holds 2**n and 2**-n
_TOGETHER: Final = 64  # tiles
_BYTE: Final = 256

_Numbers = np.ndarray[Any, np.dtype[Any]]
_Real = int | float


@dataclass(frozen=True)
class Histogram:
    """Histogram with bins of equal width.

    Attributes:
        start: start of the first bin; infinite if it is beyond float64.
        width: width of each bin; its start is inclusive and its end exclusive. 0, with one bin,
            means that all elements are equal to `start`.
        counts: number of elements per bin; there are at most 64 bins.
    """

    start: _Real
    width: _Real
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Statistics:
    """Statistics of an array's elements.

    Attributes:
        count: number of all elements.
        nan, positive_infinity, negative_infinity: number of such elements. The fields below exclude
            them.
        zeros: number of zeros.
        min, max: exact extremes; None if no element is finite.
        mean: mean; that of integers is exact up to one rounding.
        std: standard deviation of the population: squares are divided by the number of elements.
        norm: square root of the sum of squares; infinite if it is beyond float64.
        histogram: histogram; None if no element is finite.
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
    """Statistics of the elements added so far."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        """Begin without elements; `dtype` is bool, integer or floating, perhaps of `ml_dtypes`.

        Raises:
            TypeError: `dtype` is another one.
        """
        self._floating = is_floating(dtype)
        if not self._floating and dtype != np.bool_:
            try:
                ml_dtypes.iinfo(dtype)
            except ValueError:
                raise TypeError(
                    f"{dtype.name}: expected bool, integers or floating numbers"
                ) from None
        self._dtype = dtype
        self._sums = _Sums()
        self._by_bits: _Numbers | None = None
        if dtype.itemsize <= 2:
            self._by_bits = np.zeros(1 << 8 * dtype.itemsize, np.int64)

    def add(self, block: _Numbers) -> None:
        """Add elements, in any order and shape.

        Raises:
            TypeError: the elements have another dtype.
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
        """Return the statistics of all elements."""
        if self._by_bits is None:
            return self._sums.result()
        sums, bits = _Sums(), np.flatnonzero(self._by_bits)
        if bits.size:
            values = bits.astype(f"u{self._dtype.itemsize}").view(self._dtype)
            plain = _as_float64(values) if self._floating else values.astype(np.int64)
            sums.add(plain, self._by_bits[bits], floating=self._floating)
        return sums.result()


class _Sums:
    """Sums from which the statistics are computed."""

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
        """Add numbers, at least one, each as often as its weight says; None: once."""
        self._count += _weight(weights, values.size)
        least, most = values.min().item(), values.max().item()
        if floating and not (math.isfinite(least) and math.isfinite(most)):
            self._nan += _weight_where(np.isnan(values), weights)
            self._above += _weight_where(values == math.inf, weights)
            self._below += _weight_where(values == -math.inf, weights)
            is_finite = np.isfinite(values)
            values, weights = values[is_finite], None if weights is None else weights[is_finite]
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
        """Return the statistics of all numbers."""
        self._join_tiles()
        has_finite = self._finite > 0
        mean = self._sum / self._finite if has_finite else Fraction(0)
        squares = Fraction(self._squares) * Fraction(4) ** self._exponent
        return Statistics(
            count=self._count,
            nan=self._nan,
            positive_infinity=self._above,
            negative_infinity=self._below,
            zeros=self._zeros,
            min=self._least if has_finite else None,
            max=self._most if has_finite else None,
            mean=float(mean) if has_finite else None,
            std=_root(squares / self._finite) if has_finite else None,
            norm=_root(squares + self._sum * mean) if has_finite else None,
            histogram=self._bins.result() if has_finite else None,
        )

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
        """Combine the tiles, many at once, since arithmetic with fractions is slow."""
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
        if weights is None:  # in halves, so that a tile's sum fits 64 bits
            total = (int((above >> 32).sum()) << 32) + int((above & 0xFFFFFFFF).sum())
        else:
            total = int((above.astype(np.int64) * weights).sum())
        squares = _sum_of_squares(above.astype(np.float64) - total / count, weights)
        self._join(Fraction(total + least * count), count)
        self._add_squares(squares, 0)

    def _join(self, total: Fraction, count: int) -> None:
        """Add the sum of `count` numbers, and what their mean's distance adds to the squares."""
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
        """Add squares in units of 4**exponent; values below the precision vanish."""
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
    """Histogram whose bins widen with the range of the numbers.

    There are no bins while all numbers are equal.
    """

    def __init__(self) -> None:
        self._same: tuple[_Real, int] = (0, 0)
        self._range: tuple[_Real, _Real] | None = None
        self._exponent = 0
        self._first = 0
        self._counts = np.zeros(MAX_BINS, np.int64)
        self._pairs = np.zeros(MAX_BINS * _BYTE, np.int64)  # by pair of adjacent numbers' bins

    def add(self, values: _Numbers, weights: _Numbers | None, least: _Real, most: _Real) -> None:
        """Add finite numbers; `least` and `most` span them and all earlier ones."""
        if least == most:
            self._same = (least, self._same[1] + _weight(weights, values.size))
            return
        if self._range != (least, most):
            self._unpair()
            self._widen(least, most)
        places = _bins_of(values, self._exponent, self._first)
        if weights is not None:
            self._counts += np.bincount(places, weights, MAX_BINS).astype(np.int64)
            return
        _count(self._pairs, places[: places.size // 2 * 2].view(np.uint16))
        if places.size % 2:
            self._counts[places[-1]] += 1

    def _unpair(self) -> None:
        pairs = self._pairs.reshape(MAX_BINS, _BYTE)
        self._counts += pairs.sum(0)[:MAX_BINS] + pairs.sum(1)
        self._pairs[:] = 0

    def result(self) -> Histogram:
        """Return the histogram of all numbers."""
        self._unpair()
        if self._range is None:
            return Histogram(self._same[0], 0, (self._same[1],))
        last = int(np.flatnonzero(self._counts)[-1])
        width = Fraction(2) ** self._exponent
        plain = int if isinstance(self._range[0], int) else _as_float
        counts = tuple(self._counts[: last + 1].tolist())
        return Histogram(plain(self._first * width), plain(width), counts)

    def _widen(self, least: _Real, most: _Real) -> None:
        """Choose the narrowest bins that cover the range, and merge the old bins into them."""
        old, before, counted = self._exponent, self._first, self._counts.tolist()
        if self._range is None:
            # Bins that are too narrow for the range; of integers at least 1 wide.
            span = Fraction(most) - Fraction(least)
            size = span.numerator.bit_length() - span.denominator.bit_length()
            self._exponent = max(size - 8, 0) if isinstance(least, int) else size - 8
        while _bin_of(most, self._exponent) - _bin_of(least, self._exponent) >= MAX_BINS:
            self._exponent += 1
        self._first = _bin_of(least, self._exponent)
        self._counts = np.zeros(MAX_BINS, np.int64)
        if self._range is None:
            value, count = self._same
            if count:
                self._counts[_bin_of(value, self._exponent) - self._first] = count
        for place, count in enumerate(counted if self._range else ()):
            moved = (before + place >> self._exponent - old) - self._first
            if count:
                self._counts[moved] += count
        self._range = (least, most)


def _as_float64(values: _Numbers) -> _Numbers:
    with np.errstate(invalid="ignore"):  # casts of signaling NaNs warn
        return values.astype(np.float64, copy=False)


def _weight(weights: _Numbers | None, size: int) -> int:
    return size if weights is None else int(weights.sum())


def _weight_where(those: _Numbers, weights: _Numbers | None) -> int:
    return int(np.count_nonzero(those)) if weights is None else int(weights[those].sum())


def _sum_of_squares(values: _Numbers, weights: _Numbers | None) -> float:
    # No dot product: the threads of its BLAS contend on a busy machine.
    squares = values * values
    return float((squares if weights is None else squares * weights).sum())


def _above(values: _Numbers, least: int) -> _Numbers:
    """Return integers minus their minimum, as uint64."""
    return values.astype(np.uint64) - np.uint64(least % (1 << 64))


def _bin_of(value: _Real, exponent: int) -> int:
    return math.floor(Fraction(value) / Fraction(2) ** exponent)


def _bins_of(values: _Numbers, exponent: int, first: int) -> _Numbers:
    """Return the number of each element's bin, counted from the bin `first`, as uint8."""
    if values.dtype.kind != "f":
        return (_above(values, first << exponent) >> np.uint64(exponent)).astype(np.uint8)
    if abs(exponent) <= _FACTORS[values.dtype.itemsize]:
        scaled: _Numbers = values * values.dtype.type(2.0**-exponent)
    else:
        scaled = np.ldexp(_as_float64(values), -exponent)
    np.floor(scaled, out=scaled)
    if exponent > 0:  # negative numbers that underflowed to 0
        np.copyto(scaled, -1, where=(values < 0) & (scaled == 0))
    scaled -= scaled.dtype.type(first)
    places: _Numbers = scaled.astype(np.uint8)
    return places


def _count(counts: _Numbers, numbers: _Numbers) -> None:
    """Add the number of occurrences of each number to `counts`."""
    # In place: `bincount` would allocate all counts anew each time.
    np.add.at(counts, numbers.astype(np.intp), 1)


def _as_float(number: Fraction) -> float:
    """Return a fraction as the nearest float; infinite if it is beyond float64."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _root(square: Fraction) -> float:
    """Return the square root as a float; infinite if it is beyond float64."""
    if not square:
        return 0.0
    half = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    try:
        return math.ldexp(math.sqrt(square / Fraction(4) ** half), half)
    except OverflowError:
        return math.inf
