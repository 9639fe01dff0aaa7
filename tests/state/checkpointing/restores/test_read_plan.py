"""A plan of who reads what covers all slices, each element once, and shares the bytes out."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.state.seams import BOX_BYTES, SharedLeaf, batch_bytes, batches, shared_boxes

AXIS = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
"""(slices, elements of each, elements of a chunk)"""


@st.composite
def shared_leaves(draw):
    axes = draw(st.lists(AXIS, max_size=3))
    starts = itertools.product(*(range(0, count * size, size) for count, size, _ in axes))
    everybody = st.sets(st.integers(0, 5), min_size=1).map(lambda one: tuple(sorted(one)))
    slices = {start: draw(everybody) for start in starts}
    chunks, shape = tuple(axis[2] for axis in axes), tuple(axis[1] for axis in axes)
    return SharedLeaf("leaf", draw(st.sampled_from([1, 2, 8])), chunks, shape, slices)


@given(shared_leaves())
def test_each_element_of_each_slice_is_read_once_by_one_that_holds_it(leaf):
    read = {origin: np.zeros(leaf.shape, int) for origin in leaf.slices}
    for part in shared_boxes([leaf]):
        assert part.holders == leaf.slices[part.within]
        assert part.reader in part.holders
        assert part.nbytes == int(np.prod(part.shape)) * leaf.itemsize
        starts = [at - first for at, first in zip(part.origin, part.within, strict=True)]
        box = tuple(slice(at, at + n) for at, n in zip(starts, part.shape, strict=True))
        read[part.within][box] += 1
    assert all((one == 1).all() for one in read.values())


@given(shared_leaves())
def test_parts_of_a_slice_share_no_chunk(leaf):
    touched = Counter()
    for part in shared_boxes([leaf]):
        spans = (
            range(start // chunk, -(-(start + size) // chunk))
            for start, size, chunk in zip(part.origin, part.shape, leaf.chunks, strict=True)
        )
        touched.update((part.within, index) for index in itertools.product(*spans))
    assert set(touched.values()) == {1}


@given(st.lists(shared_leaves(), max_size=4), st.integers(1, 400))
def test_no_process_holds_more_than_the_limit_of_a_batch_of_several_parts(leaves, limit):
    parts = shared_boxes([leaf._replace(path=str(i)) for i, leaf in enumerate(leaves)])
    cut = batches(parts, limit)
    assert [part for batch in cut for part in batch] == parts
    for batch in cut:
        held, number = Counter(), Counter()
        for part in batch:
            held.update(dict.fromkeys(part.holders, part.nbytes))
            number.update(part.holders)
        assert all(held[one] <= limit or number[one] == 1 for one in held)


def test_many_leaves_are_shared_out_evenly_whatever_their_size():
    leaves = [SharedLeaf(str(n), 4, (100,), (n * 37,), {(0,): (0, 1, 2)}) for n in range(1, 90)]
    read = Counter()
    parts = shared_boxes(leaves)
    for part in parts:
        read[part.reader] += part.nbytes
    assert max(read.values()) - min(read.values()) <= max(part.nbytes for part in parts)


def test_a_large_leaf_is_read_in_stretches_of_bounded_size():
    leaf = SharedLeaf("w", 4, (256, 4096), (1 << 16, 4096), {(0, 0): (0, 1)})
    parts = shared_boxes([leaf])
    assert max(part.nbytes for part in parts) <= BOX_BYTES
    assert {part.reader for part in parts} == {0, 1}


def test_who_holds_much_reads_it_in_some_64_batches():
    slices = {(at,): (0, 1) if at < 2**33 else (2, 3) for at in range(0, 2**34, 2**32)}
    parts = shared_boxes([SharedLeaf("leaf", 1, (2**22,), (2**32,), slices)])
    limit = batch_bytes(parts, 1)
    assert limit == 2**33 // 64
    assert 64 <= len(batches(parts, limit)) <= 68


def test_who_holds_little_reads_as_much_at_a_time_as_is_always_allowed():
    leaf = SharedLeaf("leaf", 4, (8,), (64,), {(0,): (0, 1, 2)})
    assert batch_bytes(shared_boxes([leaf]), 100) == 100
    assert batch_bytes([], 100) == 100
