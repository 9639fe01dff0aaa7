import itertools
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.state.checkpointing.leaf_forms import BITCAST, STORED_DTYPES, WIDENED
from cairn.storage.arrays.digests import (
    box_digest,
    digest_chunks,
    digest_text,
    parse_digest,
    total,
)
from cairn.storage.arrays.dtypes import dtype_named
from tests.storage.seams import digests

MODULUS = 2**64
DTYPES = sorted(STORED_DTYPES | WIDENED | BITCAST)
SMALL = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def splitmix64(state):
    mixed = (state + 0x9E3779B97F4A7C15) % MODULUS
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % MODULUS
    return mixed ^ (mixed >> 31)


def key(axis, number):
    high = splitmix64(splitmix64(2 * axis) + number // 4096) | 1
    low = splitmix64(splitmix64(2 * axis + 1) + number % 4096) | 1
    return high * low


def by_definition(values, origin):
    """The digest as the module's text defines it, byte by byte."""
    if values.ndim == 0:
        values, origin = values.reshape(1), (0,)
    bits = SMALL.get(values.dtype.name, 8)
    found = 0
    for index in np.ndindex(values.shape):
        *leading, last = (a + b for a, b in zip(index, origin, strict=True))
        keys = 1
        for axis, number in enumerate(leading):
            keys *= key(axis, number)
        for offset, byte in enumerate(values[index].tobytes()):
            at = last * values.itemsize + offset
            word = (byte % 2**bits) << 8 * (at % 4)
            found += word * keys * key(values.ndim - 1, at // 4)
    return found % MODULUS


def random_bits(dtype, shape, seed=0):
    """An array of any bit patterns that the dtype has."""
    dtype = dtype_named(dtype)
    count = int(np.prod(shape, dtype=int))
    numbers = np.random.default_rng(seed)
    if dtype == np.bool_:
        return numbers.integers(0, 2, shape).astype(bool)
    if dtype.name in SMALL:
        codes = np.arange(2 ** SMALL[dtype.name]).astype(np.uint8)
        return numbers.choice(codes, shape).view(dtype)
    return np.frombuffer(numbers.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()


@st.composite
def cut_arrays(draw):
    """(array, origin, a cut of each axis in ascending positions)."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple))
    origin = tuple(draw(st.integers(0, 5000)) for _ in shape)
    cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size)))}) for size in shape]
    array = random_bits(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 99)))
    return array, origin, cuts


@pytest.mark.parametrize("dtype", DTYPES)
def test_digest_is_the_defined_sum_for_every_dtype(dtype):
    for shape, origin in [
        ((), ()), ((7,), (4093,)), ((3, 5), (1, 3)), ((2, 3, 1), (5, 4096, 7)), ((40, 3), (9, 0)),
        ((4, 8), (0, 4)), ((3, 2, 50), (0, 2, 1)),
    ]:  # fmt: skip
        array = random_bits(dtype, shape)
        expected = by_definition(array, origin)
        assert box_digest(array, origin) == expected
        # The same elements, laid out otherwise.
        assert box_digest(np.array(array, order="F"), origin) == expected
        spread = np.zeros([2 * size for size in shape], array.dtype)
        spread[tuple(slice(None, None, 2) for _ in shape)] = array
        assert box_digest(spread[tuple(slice(None, None, 2) for _ in shape)], origin) == expected


@pytest.mark.parametrize("words", [digests.WORDS_AT_ONCE, 60])
@pytest.mark.parametrize(
    ("width", "columns"),
    [(48, (0, 48)), (50, (1, 49)), (49, (0, 48)), (50, (2, 50)), (47, (0, 47))],
    ids=["whole", "off by a word", "odd rows", "off by a pair", "odd"],
)
def test_many_rows_of_words_sum_to_what_is_defined_however_they_lie(
    monkeypatch, words, width, columns
):
    monkeypatch.setattr(digests, "WORDS_AT_ONCE", words)
    monkeypatch.setattr(digests, "_KEYS", 64)
    array = random_bits("uint32", (40, width))[:, slice(*columns)]
    assert box_digest(array, (3, 4090)) == by_definition(array, (3, 4090))
    assert box_digest(array[:7], (3, 1)) == by_definition(array[:7], (3, 1))


@settings(deadline=None)
@given(cut_arrays())
def test_any_cut_of_any_array_has_the_same_sum(case):
    array, origin, cuts = case
    parts = 0
    for box in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        part = array[tuple(slice(a, b) for a, b in box)]
        at = [start + a for start, (a, _) in zip(origin, box, strict=True)]
        parts += box_digest(part, at)
    assert parts % MODULUS == box_digest(array, origin)


@settings(deadline=None)
@given(cut_arrays(), st.integers(1, 127), st.data())
def test_any_change_of_one_element_changes_the_digest(case, change, data):
    array, origin, _ = case
    at = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    bits = SMALL.get(array.dtype.name, 7)
    changed = array.copy()
    element = np.array(array[at]).reshape(1).view(np.uint8)
    element[data.draw(st.integers(0, array.itemsize - 1))] ^= change % (2**bits - 1) + 1
    changed[at] = element.view(array.dtype)[0]
    if changed.tobytes() != array.tobytes():  # setting a signalling NaN may quiet it
        assert box_digest(changed, origin) != box_digest(array, origin)


def test_the_same_elements_elsewhere_have_another_digest():
    array = random_bits("float32", (6, 8))
    digests = {
        box_digest(values, origin)
        for values in (array, array[::-1], array[:, ::-1])
        for origin in ((0, 0), (1, 0), (0, 1), (4096, 0), (0, 4096))
    }
    assert len(digests) == 15
    assert box_digest(array.reshape(8, 6), (0, 0)) not in digests
    assert box_digest(array.reshape(1, 6, 8), (0, 0, 0)) not in digests


LARGE = [
    *((100_003,), (3, 40_000), (70_000, 3), (70_000, 1)),
    *((5, 3000, 9), (300, 400), (2, 1, 70_000)),
]


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int4", "complex128"])
def test_large_arrays_are_the_sum_of_their_parts(shape, dtype):
    array = random_bits(dtype, shape)
    origin = [11 * axis + 5 for axis in range(len(shape))]
    whole = box_digest(array, origin)
    axis = int(np.argmax(shape))
    parts = 0
    for start in range(0, shape[axis], 1777):
        cut = [slice(None)] * len(shape)
        cut[axis] = slice(start, start + 1777)
        part = array[tuple(cut)]
        at = list(origin)
        at[axis] += start
        parts += box_digest(part, at)
    assert parts % MODULUS == whole
    assert box_digest(np.array(array, order="F"), origin) == whole


def test_four_bit_integers_count_without_the_bits_above_them():
    numbers = np.arange(-8, 8, dtype=np.int8)
    signed = numbers.astype(ml_dtypes.int4)
    extended = (numbers.view(np.uint8) & 15).view(ml_dtypes.int4)
    assert box_digest(signed, (0,)) == box_digest(extended, (0,))
    unsigned = (numbers.view(np.uint8) & 15).astype(ml_dtypes.uint4)
    assert box_digest(signed, (0,)) == box_digest(unsigned, (0,))


def test_array_without_elements_has_digest_zero():
    assert box_digest(np.zeros((0, 3), np.float32), (0, 0)) == 0
    assert box_digest(np.zeros((2, 0), ml_dtypes.int4), (4, 0)) == 0
    assert digest_chunks(np.zeros((0, 3), np.float32), (0, 0), (1, 3)).size == 0


@settings(deadline=None)
@given(cut_arrays(), st.data())
def test_chunks_add_up_to_the_array_and_are_those_of_boxes(case, data):
    array, origin, _ = case
    chunk = [data.draw(st.integers((size + 2) // 3, size + 2)) for size in array.shape]
    origin = [start * step for start, step in zip(origin, chunk, strict=True)]
    found = digest_chunks(array, origin, chunk)
    assert found.dtype == np.uint64
    assert found.shape == tuple(-(-n // c) for n, c in zip(array.shape, chunk, strict=True))
    assert total(found) == box_digest(array, origin)
    last = [n - 1 for n in found.shape]
    first = [n * c for n, c in zip(last, chunk, strict=True)]
    part = array[tuple(slice(a, None) for a in first)]
    at = [a + b for a, b in zip(origin, first, strict=True)]
    assert int(found[tuple(last)]) == box_digest(part, at)


def test_scalar_is_one_chunk():
    found = digest_chunks(np.float32(2.5).reshape(()), (), ())
    assert found.shape == ()
    assert total(found) == box_digest(np.float32([2.5]), (0,)) != 0


def test_memory_does_not_follow_the_array():
    array = np.zeros((8, 1024, 1024), np.float32)
    for values in (array, array.view(ml_dtypes.bfloat16)[:, :, 1:], array.transpose(2, 1, 0)):
        box_digest(values[:1], (0,) * 3)
        tracemalloc.start()
        box_digest(values, (0,) * 3)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3 << 20 < array.nbytes // 8


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("shape", [(4,), (3000,), (40, 250), (40, 2), (9, 3, 8), (64, 1026)])
def test_where_in_memory_an_array_lies_does_not_matter(shape, dtype):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(nbytes + 32, np.uint8)
    found = set()
    for start in range(17):
        octets = memory[start : start + nbytes]
        octets[:] = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        found.add(box_digest(octets.view(dtype).reshape(shape), (12,) * len(shape)))
    assert len(found) == 1


@settings(deadline=None)
@given(st.integers(0, MODULUS - 1))
def test_text_of_a_digest_is_read_back(value):
    text = digest_text(value)
    assert text.startswith(f"{digests.ALGORITHM}:")
    assert len(text) == len(digests.ALGORITHM) + 17
    assert parse_digest(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "crc32c:00000000", f"{digests.ALGORITHM}:12", f"{digests.ALGORITHM}:{'0' * 17}", "0" * 16],
)
def test_text_of_another_digest_is_none(text):
    assert parse_digest(text) is None
