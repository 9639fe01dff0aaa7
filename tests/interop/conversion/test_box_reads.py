"""Boxes of tensors in files: what is read for them, in which pieces, and once."""

import math
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cairn.interop.conversion.box_reads import covering_box, merge_boxes, read_boxes
from cairn.interop.conversion.boxes import element_count, whole_box
from tests.interop.seams import box_reads, intersection

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)
limits = st.integers(0, 60)


def boxes(shape):
    spans = [
        st.lists(st.integers(0, size), min_size=2, max_size=2, unique=True).map(sorted)
        for size in shape
    ]
    return st.tuples(*spans).map(lambda pairs: tuple(slice(low, high) for low, high in pairs))


def limited(gap, piece):
    return mock.patch.multiple(box_reads, GAP_BYTES=gap, PIECE_BYTES=piece)


@given(st.data(), shapes, limits, limits)
def test_boxes_are_read_whatever_the_limits_and_no_number_twice(data, shape, gap, piece):
    array = np.arange(math.prod(shape), dtype=np.int16).reshape(shape)
    wanted = data.draw(st.lists(boxes(shape), min_size=1, max_size=4))
    times, most = np.zeros(array.size, int), max(1, piece // 2)

    def read(first, out):
        last = first + out.size
        assert out.size <= most
        times[first:last] += 1
        out[:] = array.reshape(-1)[first:last]

    with limited(gap, piece):
        found = read_boxes(shape, array.dtype, wanted, read)
    for box, values in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(values, array[box])
    assert times.max() == 1


@given(st.data(), shapes, limits)
def test_what_is_read_for_a_box_holds_it_and_is_the_box_where_no_gap_is_allowed(data, shape, gap):
    box = data.draw(boxes(shape))
    with limited(gap, 1):
        cover = covering_box(shape, 2, box)
    assert intersection(cover, box) == box or not shape
    with limited(0, 1):
        assert element_count(covering_box(shape, 2, box)) == element_count(box)


@given(st.data(), shapes, limits)
def test_what_is_read_for_several_boxes_overlaps_nowhere(data, shape, gap):
    wanted = data.draw(st.lists(boxes(shape), min_size=1, max_size=5))
    with limited(gap, 1):
        found = merge_boxes(wanted, lambda box: covering_box(shape, 2, box))
    for number, one in enumerate(found):
        assert not any(intersection(one, other) is not None for other in found[:number])
    for box in wanted:
        assert sum(intersection(box, cover) == box for cover in found) == 1 or not shape


def test_columns_close_by_take_whole_rows_and_distant_ones_themselves():
    near, far = (64, 1024), (64, 1 << 20)
    assert covering_box(near, 4, (slice(0, 8), slice(0, 512))) == (slice(0, 8), slice(0, 1024))
    apart = (slice(0, 8), slice(0, 1 << 19))
    assert covering_box(far, 4, apart) == apart
    experts = (8, 1024, 1024)
    rows = (slice(0, 8), slice(0, 512), slice(0, 1024))
    assert covering_box(experts, 4, rows) == rows
    assert covering_box(experts, 4, (*rows[:2], slice(0, 512))) == rows


def test_boxes_that_make_up_their_rows_share_their_memory():
    array = np.arange(32, dtype=np.float32).reshape(4, 8)
    wanted = [(slice(0, 4), slice(n, n + 2)) for n in range(0, 8, 2)]

    def read(first, out):
        out[:] = array.reshape(-1)[first : first + out.size]

    together = read_boxes(array.shape, array.dtype, wanted, read)
    (alone,) = read_boxes(array.shape, array.dtype, wanted[:1], read)
    whole = read_boxes(array.shape, array.dtype, [whole_box(array.shape)], read)
    assert len({memory(values).ctypes.data for values in together}) == 1
    assert memory(together[0]).nbytes < 2 * array.nbytes
    for values in (alone, *whole):
        assert values.flags.c_contiguous
        assert values.flags.writeable
        assert values.ctypes.data % 64 == 0, "JAX takes it as it is"
        assert memory(values).nbytes < values.nbytes + 128


def memory(values):
    while isinstance(values.base, np.ndarray):
        values = values.base
    return values
