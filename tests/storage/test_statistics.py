import math
import random
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.arrays import statistics
from tests.faults.report import trials

DTYPES = ("bool", "int8", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32")
DTYPES += ("float64", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4", "float4_e2m1fn")


def dtype_of(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def statistics_of(*blocks):
    running = statistics.RunningStatistics(blocks[0].dtype)
    for block in blocks:
        running.add(block)
    return running.result()


def anything(name, size, seed):
    """Elements of any bits that the dtype has."""
    dtype = dtype_of(name)
    values = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, np.uint8)
    if name == "bool":
        values &= 1
    if name in ("int4", "uint4", "float4_e2m1fn"):
        return (values & 15).view(dtype)
    return values.view(dtype)


def start_of(histogram):
    beyond = Fraction(2) ** 1024
    return -beyond if histogram.start == -math.inf else Fraction(histogram.start)


def bin_of(histogram, value):
    return math.floor((Fraction(value) - start_of(histogram)) / Fraction(histogram.width))


def numbers_of(values):
    """Each element as a number of Python."""
    if values.dtype.name.startswith(("float", "bfloat")):
        with np.errstate(invalid="ignore"):
            return values.astype(np.float64).tolist()
    return [int(one) for one in values]


def root_of(square):
    """The square root of a number whose square no float64 may hold."""
    half = (square.numerator.bit_length() - square.denominator.bit_length()) // 2
    return Fraction(math.sqrt(square / Fraction(4) ** half)) * Fraction(2) ** half


@settings(max_examples=trials(short=100, long=1000))
@given(
    name=st.sampled_from(DTYPES),
    size=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_statistics_are_those_of_all_elements_however_they_are_cut(name, size, seed, data):
    values = anything(name, size, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    found = statistics_of(*np.split(values, cuts))

    listed = numbers_of(values)
    finite = [one for one in listed if math.isfinite(one)]
    assert (found.count, found.zeros) == (size, finite.count(0))
    assert found.nan == sum(math.isnan(one) for one in listed)
    assert found.positive_infinity == listed.count(math.inf)
    assert found.negative_infinity == listed.count(-math.inf)
    if not finite:
        assert {found.min, found.max, found.mean, found.std, found.norm} == {None}
        return
    assert (found.min, found.max) == (min(finite), max(finite))
    exact = [Fraction(one) for one in finite]
    mean, largest = sum(exact) / len(exact), max(map(abs, exact))
    assert abs(Fraction(found.mean) - mean) <= largest * Fraction(1, 10**14)
    std = root_of(sum((one - mean) ** 2 for one in exact) / len(exact))
    assert abs(Fraction(found.std) - std) <= largest * Fraction(1, 10**12)
    norm = root_of(sum(one**2 for one in exact))
    if math.isinf(found.norm):
        assert norm > Fraction(np.finfo(np.float64).max)
    else:
        assert abs(Fraction(found.norm) - norm) <= norm * Fraction(1, 10**9)


@settings(max_examples=trials(short=100, long=1000))
@given(
    name=st.sampled_from(DTYPES),
    size=st.integers(1, 300),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_each_finite_element_is_in_its_bin(name, size, seed, data):
    values = anything(name, size, seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    bins = statistics_of(*np.split(values, cuts)).histogram

    finite = [one for one in numbers_of(values) if math.isfinite(one)]
    if not finite:
        assert bins is None
        return
    assert len(bins.counts) <= statistics.MAX_BINS
    if bins.width == 0:
        assert finite == [bins.start] * bins.counts[0]
        return
    assert math.frexp(bins.width)[0] == 0.5
    assert start_of(bins) % Fraction(bins.width) == 0
    expected = [0] * len(bins.counts)
    for one in finite:
        expected[bin_of(bins, one)] += 1
    assert list(bins.counts) == expected
    assert bins.counts[0] > 0
    assert bins.counts[-1] > 0


@pytest.mark.parametrize("name", ["float32", "float64", "int64"])
def test_bins_are_as_narrow_as_they_can_be(name):
    values = np.arange(1000).astype(name)
    random.Random(0).shuffle(values)
    bins = statistics_of(*np.split(values, 10)).histogram
    assert (bins.start, bins.width, len(bins.counts)) == (0, 16, 63)
    assert set(bins.counts[:-1]) == {16}


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32"])
def test_bins_count_each_element_of_a_large_array_whose_range_grows(name):
    values = np.random.default_rng(0).standard_normal(200_001) * np.geomspace(1, 1000, 200_001)
    values = values.astype(dtype_of(name))
    bins = statistics_of(*np.split(values, [1, 99_999])).histogram
    places = np.floor((values.astype(np.float64) - bins.start) / bins.width).astype(int)
    assert list(bins.counts) == np.bincount(places).tolist()


def test_bins_of_integers_are_not_narrower_than_one():
    bins = statistics_of(np.asarray([3, 4, 4, 9], np.int32)).histogram
    assert (bins.start, bins.width, bins.counts) == (3, 1, (1, 2, 0, 0, 0, 0, 1))


def test_mean_of_large_integers_is_exact():
    values = np.full(100_001, 2**63 - 1, np.int64)
    values[::2] -= 2
    found = statistics_of(values[:60_000], values[60_000:])
    assert found.mean == float(Fraction(sum(map(int, values)), values.size))
    assert found.std == pytest.approx(1.0, rel=1e-4)
    assert (found.min, found.max) == (2**63 - 3, 2**63 - 1)


def test_small_deviation_from_a_large_mean_is_found():
    values = 1e9 + np.random.default_rng(0).standard_normal(500_000)
    found = statistics_of(*np.split(values, 7 * np.arange(1, 9) * 1000))
    assert found.std == pytest.approx(np.std(values - 1e9), rel=1e-6)


@pytest.mark.parametrize("scale", [1e-308, 1e-200, 1e200, 1e305])
def test_squares_neither_overflow_nor_vanish(scale):
    values = np.random.default_rng(0).uniform(-1, 1, 200_000)
    found = statistics_of(*np.split(values * scale, [10, 100_000]))
    assert found.std == pytest.approx(values.std() * scale, rel=1e-6)
    assert found.norm == pytest.approx(np.linalg.norm(values) * scale, rel=1e-6)
    assert sum(found.histogram.counts) == values.size


def test_bins_of_the_largest_numbers_begin_beyond_them():
    most = np.finfo(np.float64).max
    bins = statistics_of(np.asarray([-most, 0, most])).histogram
    assert (bins.start, sum(bins.counts)) == (-math.inf, 3)


def test_tiny_numbers_beside_ordinary_ones_add_nothing():
    ordinary = np.random.default_rng(0).standard_normal(100)
    tiny = np.full(100, 1e-300)
    for blocks in ((ordinary, tiny), (tiny, ordinary)):
        assert statistics_of(*blocks).std == pytest.approx(np.std([*ordinary, *tiny]), rel=1e-12)


def test_constant_array_has_one_bin_and_no_deviation():
    for values in (np.full(70_000, 0.1, np.float32), np.zeros(5, np.int64)):
        found = statistics_of(values)
        assert (found.std, found.min == found.max) == (0.0, True)
        assert (found.histogram.width, found.histogram.counts) == (0, (values.size,))


def test_nothing_has_no_statistics():
    for name in ("float32", "int8"):
        found = statistics_of(np.zeros(0, name))
        assert (found.count, found.min, found.mean, found.histogram) == (0, None, None, None)


@pytest.mark.parametrize("name", ["complex64", "U3", "object", "datetime64[s]"])
def test_other_dtypes_are_refused(name):
    with pytest.raises(TypeError, match="expected bool, integers or floating"):
        statistics.RunningStatistics(np.dtype(name))


def test_block_of_another_dtype_is_refused():
    with pytest.raises(TypeError, match="a block of float64: expected float32"):
        statistics.RunningStatistics(np.dtype("float32")).add(np.zeros(3))
