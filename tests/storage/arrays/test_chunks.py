import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.storage.arrays.chunks import (
    inner_chunk_shape,
    outer_shard_shape,
)
from tests.storage.seams import chunks

SHAPES = st.lists(st.integers(1, 5000), min_size=0, max_size=4).map(tuple)
ITEMSIZES = st.sampled_from([1, 2, 4, 8, 16])


def size(shape):
    return int(np.prod(shape, dtype=object))


def assert_divides_and_stays_below(part, shape, itemsize, limit):
    """At most `limit` bytes, unless the axis that was cut has no fitting divisor in between."""
    assert len(part) == len(shape)
    assert all(whole % one == 0 for whole, one in zip(shape, part, strict=True))
    nbytes = size(part) * itemsize
    assert nbytes >= min(chunks.MIN_CHUNK_BYTES, size(shape) * itemsize)
    if nbytes > limit:
        axis = next(axis for axis, one in enumerate(part) if one > 1)
        smaller = max(one for one in range(1, part[axis]) if shape[axis] % one == 0)
        assert nbytes // part[axis] * smaller < chunks.MIN_CHUNK_BYTES


def assert_in_one_piece(part, shape):
    cut = [axis for axis in range(len(shape)) if part[axis] < shape[axis]]
    if cut:
        assert all(part[axis] == 1 for axis in range(max(cut)))


@given(SHAPES, st.integers(1, 8), ITEMSIZES, st.booleans())
def test_inner_chunks_divide_their_shard_and_stay_small(shard, copies, itemsize, square):
    whole = tuple(size * copies for size in shard)
    chunk = inner_chunk_shape(whole, shard, itemsize, square=square)
    assert_divides_and_stays_below(chunk, shard, itemsize, chunks.CHUNK_BYTES)


@given(SHAPES, ITEMSIZES)
def test_outer_shards_divide_what_a_device_holds_and_lie_in_one_piece(part, itemsize):
    shard = outer_shard_shape(part, itemsize)
    assert_divides_and_stays_below(shard, part, itemsize, chunks.SHARD_BYTES)
    assert_in_one_piece(shard, part)
    if size(part) * itemsize <= chunks.SHARD_BYTES:
        assert shard == part


@given(SHAPES, ITEMSIZES)
def test_strips_lie_in_one_piece_in_memory(shard, itemsize):
    assert_in_one_piece(inner_chunk_shape(shard, shard, itemsize, square=False), shard)


def test_a_large_matrix_is_cut_into_squares_so_that_both_directions_read_little():
    assert chunks.SQUARE_ABOVE_BYTES < 49152 * 4096 * 4
    assert inner_chunk_shape((49152, 4096), (6144, 4096), 4) == (1024, 1024)


def test_a_small_matrix_is_cut_into_row_strips():
    assert chunks.SQUARE_ABOVE_BYTES > 4096 * 1024 * 4
    assert inner_chunk_shape((4096, 1024), (2048, 1024), 4) == (1024, 1024)
    assert inner_chunk_shape((1024, 4096), (1024, 4096), 4) == (256, 4096)


def test_nobody_reads_optimizer_leaves_by_columns_so_they_are_never_cut_across():
    assert inner_chunk_shape((8192, 16384), (1024, 16384), 4, square=False) == (64, 16384)


@pytest.mark.parametrize(
    "shard", [(1048583,), (2 * 1048583,), (1, 1048583), (1048583, 1), (200_000, 7, 11)]
)
def test_a_size_with_a_large_prime_factor_is_not_cut_into_single_elements(shard):
    """A raveled model may have any number of elements; a chunk each would never be written."""
    whole = (64, *shard)  # large enough for squares
    chunk = inner_chunk_shape(whole, (1, *shard), 4)
    assert np.prod(chunk) * 4 >= chunks.MIN_CHUNK_BYTES
    assert np.prod(shard) / np.prod(chunk) < 1000
