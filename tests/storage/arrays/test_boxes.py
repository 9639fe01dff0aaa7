import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.arrays.boxes import (
    MAX_CHUNK_ROW_BYTES,
    MAX_CHUNKS_PER_READ,
    READ_BYTES,
    boxes,
    chunk_boxes,
    chunk_count,
    copy_permuted,
    fill,
    read_boxes,
)
from cairn.storage.reading.block_stream import BlockPlan


@st.composite
def gridded(draw):
    """(shape, chunk shape, position of the origin in its chunk)."""
    shape = draw(st.lists(st.integers(0, 7), max_size=4).map(tuple))
    grid = tuple(draw(st.integers(1, 5)) for _ in shape)
    phase = tuple(draw(st.integers(0, chunk - 1)) for chunk in grid)
    return shape, grid, phase


def size_of(box):
    return math.prod(part.stop - part.start for part in box)


@given(gridded(), st.integers(1, 400))
def test_boxes_cover_the_array_once_in_c_order_within_the_limit(case, limit):
    shape, grid, phase = case
    array = np.arange(math.prod(shape)).reshape(shape)
    cut = list(boxes(shape, limit, grid=grid, phase=phase))
    assert all(size_of(box) <= limit for box in cut)
    parts = [array[box].ravel() for box in cut]
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *parts]), array.ravel())


@given(gridded(), st.integers(1, 400))
def test_bands_cover_the_array_once_in_c_order(case, max_bytes):
    shape, grid, phase = case
    array = np.arange(math.prod(shape)).reshape(shape)
    parts = [array[box].ravel() for box in read_boxes(shape, 4, max_bytes, grid=grid, phase=phase)]
    np.testing.assert_array_equal(np.concatenate([np.empty(0, int), *parts]), array.ravel())


def test_cuts_fall_on_chunk_borders():
    cut = boxes((100, 10), 350, grid=(8, 10), phase=(3, 0))
    assert [box[0].stop for box in cut] == [29, 61, 93, 100]


def chunks_in(box, grid):
    """Indices of the chunks that a box touches."""
    return itertools.product(
        *(range(part.start // chunk, -(-part.stop // chunk))
          for part, chunk in zip(box, grid, strict=True))
    )  # fmt: skip


@settings(deadline=None)
@given(gridded(), st.integers(1, 400))
def test_boxes_of_chunks_cover_a_part_once_and_share_no_chunk(case, limit):
    shape, grid, phase = case
    window = tuple(slice(start, start + size) for start, size in zip(phase, shape, strict=True))
    cut = list(chunk_boxes(window, grid, limit))
    counts = np.zeros([part.stop for part in window], int)
    for box in cut:
        counts[box] += 1
        chunks = [*chunks_in(box, grid)]
        assert len(chunks) * math.prod(grid) <= max(limit, math.prod(grid))
    assert (counts[window] == 1).all()
    assert counts.sum() == math.prod(shape)
    touched = [chunk for box in cut for chunk in chunks_in(box, grid)]
    assert len(touched) == len(set(touched))


def test_no_box_has_more_chunks_than_memory_is_worth():
    first = next(chunk_boxes((slice(0, 2**40), slice(0, 2)), (1, 1), 2**50))
    assert chunk_count([part.stop - part.start for part in first], (1, 1)) <= MAX_CHUNKS_PER_READ
    plan = BlockPlan((slice(0, 2**40),), (1,), (0,), 0, 1, 16 << 20)
    band = next(plan.bands())
    for piece in itertools.islice(plan.pieces(band), 3):
        assert chunk_count([piece[0].stop - piece[0].start], (1,)) <= MAX_CHUNKS_PER_READ


def test_pieces_of_a_stream_decode_each_chunk_once():
    window, grid = (slice(0, 8192), slice(0, 8192)), (1024, 1024)
    for axes in ((0, 1), (1, 0)):
        plan = BlockPlan(window, grid, axes, 0, 4, 16 << 20)
        pieces = [piece for band in plan.bands() for piece in plan.pieces(band)]
        touched = [chunk for piece in pieces for chunk in chunks_in(piece, grid)]
        assert sorted(touched) == [*np.ndindex(8, 8)]
        assert max(size_of(piece) * 4 for piece in pieces) <= READ_BYTES


def decodes(shape, grid, itemsize, max_bytes):
    """How often each chunk is touched, and the largest band in bytes."""
    touched: dict[tuple[int, ...], int] = {}
    largest = 0
    for box in read_boxes(shape, itemsize, max_bytes, grid=grid):
        largest = max(largest, size_of(box) * itemsize)
        for chunk in chunks_in(box, grid):
            touched[chunk] = touched.get(chunk, 0) + 1
    return max(touched.values()), largest


def test_each_chunk_is_decoded_once_while_a_row_of_chunks_fits():
    megabytes = 1 << 20
    for shape, grid in (
        ((32000, 2048), (1000, 1024)),  # an embedding in squares
        ((2048, 8000), (1024, 1000)),  # a row of chunks above max_bytes
        ((5632, 2048), (5632, 128)),  # columns of strips: the whole array is one row of chunks
        ((64, 1024, 1024), (1, 1024, 1024)),  # stacked experts
    ):
        times, largest = decodes(shape, grid, 4, 16 * megabytes)
        assert times == 1
        assert largest <= MAX_CHUNK_ROW_BYTES


def test_a_row_of_chunks_above_the_bound_is_read_in_parts():
    times, largest = decodes((4096, 131072), (1024, 1024), 4, 16 << 20)
    assert largest <= MAX_CHUNK_ROW_BYTES
    assert times == math.ceil(1024 * 131072 * 4 / MAX_CHUNK_ROW_BYTES)


@given(st.permutations(range(3)), st.integers(0, 40), st.integers(0, 40))
def test_permuted_copies_equal_numpy(axes, rows, columns):
    for dtype in (np.float32, ml_dtypes.bfloat16, np.bool_, np.complex128, ml_dtypes.int4):
        source = (np.arange(2 * rows * columns) % 2).astype(dtype).reshape(2, rows, columns)
        expected = source.transpose(axes)
        out = np.zeros(expected.shape, dtype)
        copy_permuted(source, axes, out)
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(15, 300), (16, 700), (128, 256), (127, 257), (300, 515)])
def test_transposed_copies_equal_numpy_whatever_the_size(shape):
    numbers = np.random.default_rng(0)
    for dtype in (np.uint8, ml_dtypes.bfloat16, np.float32, np.float64, np.complex128):
        source = numbers.integers(0, 200, (2, *shape)).astype(dtype)
        wide = np.zeros((2, shape[1] + 3, shape[0] + 5), dtype)
        out = wide[:, 1:-2, 4:-1]  # in a part of something larger
        copy_permuted(source, (0, 2, 1), out)
        assert np.array_equal(out, source.transpose(0, 2, 1))
        out[...] = 0
        assert not wide.any()
        back = np.zeros_like(source)
        copy_permuted(source.transpose(0, 2, 1), (0, 2, 1), back)  # of what lies in strides
        assert np.array_equal(back, source)


ORDERS = {
    "C": lambda shape, made: made(shape),
    "turned": lambda shape, made: made((*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2),
    "reversed": lambda shape, made: made(shape)[..., ::-1],
    "all axes": lambda shape, made: made(shape[::-1]).T,
    "a part": lambda shape, made: made(tuple(size + 3 for size in shape))[
        (slice(1, -2),) * len(shape)
    ],
}


FLOATS = np.float16, ml_dtypes.bfloat16, np.float32
CASTS = [*itertools.product(FLOATS, repeat=2), (np.int8, np.int8), (np.uint8, np.float32)]
"""Dtypes that weights come in, and go to."""

LARGE_CASTS = [(np.float32, ml_dtypes.bfloat16), (ml_dtypes.bfloat16, ml_dtypes.bfloat16)]
"""Of those that several threads copy: one that changes the width, and one that moves bits."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("shape", "casts"),
    [
        ((3, 40, 50), CASTS),
        ((1, 1200, 1300), LARGE_CASTS),
        ((70_000, 20), LARGE_CASTS),
        ((3, 500_000), LARGE_CASTS),
    ],
    ids=["small", "squares", "long", "wide"],
)
def test_fill_sets_what_numpy_would_however_the_values_lie(order, shape, casts):
    numbers = np.random.default_rng(0)
    for theirs, ours in casts:
        values = ORDERS[order](
            shape,
            lambda size, theirs=theirs: (100 * numbers.random(size, np.float32)).astype(theirs),
        )
        expected, out = np.empty(shape, ours), np.empty(shape, ours)
        expected[...] = values
        fill(out, values)
        assert out.tobytes() == expected.tobytes(), (theirs, ours)


def test_fill_keeps_every_bit_of_numbers_that_are_none():
    bits = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)
    for values in (bits, bits.T):
        for dtype in (ml_dtypes.bfloat16, np.float32):
            expected, out = np.empty((256, 256), dtype), np.empty((256, 256), dtype)
            expected[...] = values
            fill(out, values)
            assert out.tobytes() == expected.tobytes()
    fill(np.empty((0, 3), np.float32), np.empty((0, 3), np.float16))
    fill(scalar := np.zeros((), np.float32), np.ones((), np.float16))
    assert scalar == 1
