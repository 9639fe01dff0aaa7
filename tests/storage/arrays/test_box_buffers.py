"""Geometry of parts that are put together from stored boxes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.arrays.box_buffers import (
    ALIGNMENT,
    BoxBuffer,
    SmallArrays,
    aligned_empty,
    grid_overlaps,
    overlap,
)
from cairn.storage.arrays.dtypes import dtype_named
from tests.storage.parts import boxes, inside

SIZES = st.integers(1, 9)


@st.composite
def shapes_and_two_boxes(draw):
    shape = tuple(draw(st.lists(SIZES, max_size=4)))
    return shape, draw(boxes(shape)), draw(boxes(shape))


@given(shapes_and_two_boxes())
def test_an_overlap_is_what_both_boxes_hold(case):
    shape, (origin, part), (other, other_part) = case
    places = np.arange(math.prod(shape)).reshape(shape)
    one, two = places[inside(origin, part)], places[inside(other, other_part)]
    both = np.intersect1d(one, two)
    found = overlap(origin, part, other, other_part)
    if found is None:
        assert not both.size
        return
    assert np.array_equal(one[found.first], two[found.second])
    assert np.array_equal(np.sort(one[found.first], axis=None), both)


@given(shapes_and_two_boxes())
def test_an_overlap_is_the_same_from_both_sides(case):
    _, one, two = case
    there, back = overlap(*one, *two), overlap(*two, *one)
    assert (there is None) == (back is None)
    assert there is None or back == (there.second, there.first)


@st.composite
def grids(draw):
    """(shape of an array, shape of a box, some parts of the array)."""
    shape = tuple(draw(st.lists(SIZES, max_size=3)))
    box = tuple(draw(st.integers(1, size + 2)) for size in shape)
    parts = draw(st.lists(boxes(shape), min_size=1, max_size=4))
    return shape, box, parts


@given(grids())
def test_boxes_fill_every_region_exactly_once(case):
    shape, box, parts = case
    places = np.arange(math.prod(shape)).reshape(shape)
    regions = [BoxBuffer(origin, np.full(part, -1)) for origin, part in parts]
    writes = [np.zeros(part, int) for _, part in parts]
    for origin, touching in grid_overlaps(box, regions):
        assert touching
        assert all(at % step == 0 for at, step in zip(origin, box, strict=True))
        size = tuple(min(n, whole - at) for n, whole, at in zip(box, shape, origin, strict=True))
        for region in touching:
            shared = overlap(origin, size, region.origin, region.values.shape)
            assert shared is not None
            region.part(shared.second)[...] = places[inside(origin, size)][(*shared.first, ...)]
            number = next(number for number, one in enumerate(regions) if one is region)
            writes[number][(*shared.second, ...)] += 1
    for region, count, (origin, part) in zip(regions, writes, parts, strict=True):
        assert np.array_equal(region.values, places[inside(origin, part)])
        assert (count == 1).all()


@given(grids())
def test_boxes_come_in_order_and_once(case):
    _, box, parts = case
    regions = [BoxBuffer(origin, np.empty(part)) for origin, part in parts]
    origins = [origin for origin, _ in grid_overlaps(box, regions)]
    assert origins == sorted(set(origins))


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "int4", "float64", "complex128"])
@pytest.mark.parametrize("large", [(), (1 << 20, 5)])
def test_memory_for_parts_is_aligned_and_of_their_own(dtype, large):
    shapes = [(), (3,), (5, 7), (1, 1, 130), large, (0, 4), (64,)]
    arrays = aligned_empty(shapes, dtype_named(dtype))
    assert [array.shape for array in arrays] == shapes
    for number, array in enumerate(arrays):
        assert array.dtype == dtype_named(dtype)
        assert array.flags.c_contiguous
        assert array.flags.writeable
        assert array.ctypes.data % ALIGNMENT == 0 or not array.size
        array.reshape(-1).view(np.uint8)[...] = number + 1
    for number, array in enumerate(arrays):
        assert (array.reshape(-1).view(np.uint8) == number + 1).all()


def test_small_arrays_lie_apart_and_begin_where_jax_takes_them_as_they_are():
    memory = SmallArrays()
    shapes = [((n % 9 + 1,), np.float32) for n in range(300)] + [
        ((), np.int8),
        ((1 << 20,), np.uint8),
    ]
    arrays = [memory.empty(shape, np.dtype(dtype)) for shape, dtype in shapes]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % ALIGNMENT == 0
        array[...] = number % 100
    for number, (array, (shape, dtype)) in enumerate(zip(arrays, shapes, strict=True)):
        assert (array.shape, array.dtype) == (shape, dtype)
        assert (array == number % 100).all()
