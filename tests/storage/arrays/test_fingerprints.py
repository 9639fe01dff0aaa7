"""Fingerprints: what a save tells unchanged leaves by, where digests can be made to agree."""

import itertools
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.arrays import fingerprints
from cairn.storage.arrays.digests import box_digest
from cairn.storage.arrays.fingerprints import box_fingerprint
from cairn.storage.store import splitmix64
from tests.storage.arrays.test_digests import DTYPES, cut_arrays, random_bits

MODULUS = 2**64
SHAPE = (1024, 1024)
"""A chunk of float32, as most are."""


def secret_key(axis, number):
    seed = fingerprints._FINGERPRINT.seed
    high = splitmix64(splitmix64(seed + 2 * axis) + number // 4096) | 1
    low = splitmix64(splitmix64(seed + 2 * axis + 1) + number % 4096) | 1
    return high * low


def by_definition(values, origin):
    """As the module's text has it, for rows of whole words."""
    words = np.ascontiguousarray(values).view("<u8")
    start = (*origin[:-1], origin[-1] * values.itemsize // 8)
    found = 0
    for index in np.ndindex(words.shape):
        mixed = int(words[index]) * int(fingerprints._FACTOR) % MODULUS
        term = int.from_bytes(mixed.to_bytes(8, "little"), "big")
        for axis, number in enumerate(index):
            term *= secret_key(axis, start[axis] + number)
        found += term
    return found % MODULUS


def public_keys(shape):
    """The keys of "keyed-sum-64" for a matrix of float32 at the origin."""

    def of(axis, count):
        first, high = splitmix64(2 * axis + 1), splitmix64(splitmix64(2 * axis)) | 1
        return np.array(
            [(splitmix64(first + n) | 1) * high % MODULUS for n in range(count)], np.uint64
        )

    return of(0, shape[0])[:, np.newaxis] * of(1, shape[1])


def cancelling_sign_changes(values):
    """Pairs of flat indices whose two changes of sign leave "keyed-sum-64" as it is."""
    keys = public_keys(values.shape).reshape(-1)
    negative = np.signbit(values).reshape(-1)
    change = np.where(negative, -keys, keys) & np.uint64(2**33 - 1)  # x 2**31, of 2**64
    _, first, second = np.intersect1d(change, -change & np.uint64(2**33 - 1), return_indices=True)
    return [(a, b) for a, b in zip(first, second, strict=True) if a < b]


def with_signs_changed(values, at):
    changed = values.copy()
    changed.reshape(-1)[list(at)] *= -1
    return changed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex128", "float64"])
def test_fingerprint_is_the_defined_sum(dtype):
    for shape, origin in [
        ((16,), (4096 * 8,)), ((3, 8), (1, 8)), ((2, 3, 32), (5, 4096, 16)), ((90, 8), (4090, 0)),
    ]:  # fmt: skip
        array = random_bits(dtype, shape)
        expected = by_definition(array, origin)
        assert box_fingerprint(array, origin) == expected
        spread = np.zeros([2 * size for size in shape], array.dtype)
        spread[tuple(slice(None, None, 2) for _ in shape)] = array
        assert box_fingerprint(spread[tuple(slice(None, None, 2) for _ in shape)], origin) == (
            expected
        )


@settings(deadline=None)
@given(cut_arrays())
def test_parts_that_cut_through_no_word_add_up(case):
    array, origin, cuts = case
    words = max(1, 8 // array.itemsize)  # elements of a word
    array = np.repeat(array, words, axis=-1)
    origin = [*origin[:-1], origin[-1] * words]
    cuts = [*cuts[:-1], [cut * words for cut in cuts[-1]]]
    parts = 0
    for box in itertools.product(*(itertools.pairwise(cut) for cut in cuts)):
        part = array[tuple(slice(a, b) for a, b in box)]
        at = [start + a for start, (a, _) in zip(origin, box, strict=True)]
        parts += box_fingerprint(part, at)
    assert parts % MODULUS == box_fingerprint(array, origin)


@pytest.mark.parametrize("shape", [(100_002,), (3, 40_000), (70_000, 2), (5, 3000, 10), (300, 400)])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_large_arrays_are_the_sum_of_their_parts(shape, dtype):
    array = random_bits(dtype, shape)
    origin = [6 * axis + 4 for axis in range(len(shape))]
    axis = int(np.argmax(shape))
    parts = 0
    for start in range(0, shape[axis], 1778):
        cut = [slice(None)] * len(shape)
        cut[axis] = slice(start, start + 1778)
        at = list(origin)
        at[axis] += start
        parts += box_fingerprint(array[tuple(cut)], at)
    assert parts % MODULUS == box_fingerprint(array, origin)


@settings(deadline=None)
@given(cut_arrays(), st.integers(1, 127), st.data())
def test_any_change_of_one_element_changes_the_fingerprint(case, change, data):
    array, origin, _ = case
    at = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    small = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
    bits = small.get(array.dtype.name, 7)
    changed = array.copy()
    element = np.array(array[at]).reshape(1).view(np.uint8)
    element[data.draw(st.integers(0, array.itemsize - 1))] ^= change % (2**bits - 1) + 1
    changed[at] = element.view(array.dtype)[0]
    if changed.tobytes() != array.tobytes():  # setting a signalling NaN may quiet it
        assert box_fingerprint(changed, origin) != box_fingerprint(array, origin)


@pytest.mark.parametrize("fill", ["normal", "zeros", "ones"])
def test_two_changes_of_sign_that_a_linear_digest_can_not_see_are_seen(fill):
    """Only the low 33 bits of a key count for the top bit of an element: some hundred pairs."""
    values = {
        "normal": np.random.default_rng(0).standard_normal(SHAPE, np.float32),
        "zeros": np.zeros(SHAPE, np.float32),
        "ones": np.ones(SHAPE, np.float32),
    }[fill]
    pairs = cancelling_sign_changes(values)
    assert len(pairs) > 50
    digest, print_ = box_digest(values, (0, 0)), box_fingerprint(values, (0, 0))
    for pair in pairs:
        changed = with_signs_changed(values, pair)
        assert box_digest(changed, (0, 0)) == digest
        assert box_fingerprint(changed, (0, 0)) != print_


def test_no_two_changes_of_sign_cancel():
    """Of 4,096 places each with each, both ways: a sum that saw 33 bits would have some pair."""
    values = np.random.default_rng(1).standard_normal((4096, 2), np.float32)
    whole = box_fingerprint(values, (0, 0))
    for column in (0, 1):
        changes = []
        for row in range(len(values)):
            values[row, column] *= -1
            changes.append(box_fingerprint(values[row : row + 1], (row, 0)))
            values[row, column] *= -1
            changes[-1] -= box_fingerprint(values[row : row + 1], (row, 0))
        both = {change % MODULUS for change in changes} | {-change % MODULUS for change in changes}
        assert len(both) == 2 * len(values)
        assert all(change % 2**40 for change in both)  # so that most bits of the keys count
    assert box_fingerprint(values, (0, 0)) == whole


CHANGES = {
    "two elements swapped": lambda a, i, j: a.__setitem__([i, j], a[[j, i]]),
    "two elements negated": lambda a, i, j: a.__setitem__([i, j], -a[[i, j]]),
    "one up, one down": lambda a, i, j: a.__setitem__([i, j], a[[i, j]] + np.array([1, -1])),
    "one doubled, one halved": lambda a, i, j: a.__setitem__([i, j], a[[i, j]] * [2, 0.5]),
    "the same added to all": lambda a, i, j: a.__iadd__(1),
    "all negated": lambda a, i, j: a.__imul__(-1),
    "shifted by one": lambda a, i, j: a.__setitem__(slice(None), np.roll(a, 1)),
    "reversed": lambda a, i, j: a.__setitem__(slice(None), a[::-1].copy()),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8"])
def test_changes_of_several_elements_are_seen(change, dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    numbers = np.random.default_rng(7)
    for _ in range(50):
        values = numbers.integers(1, 9, 512).astype(kind)
        i, j = numbers.choice(512, 2, replace=False)
        values[i], values[j] = 4, 6
        changed = values.copy()
        CHANGES[change](changed, i, j)
        assert changed.tobytes() != values.tobytes()
        assert box_fingerprint(changed, (0,)) != box_fingerprint(values, (0,))


def test_zeros_that_become_negative_are_seen():
    for count in (1, 2, 3, 4096):
        for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
            zeros = np.zeros(4096, dtype)
            changed = zeros.copy()
            changed[:count] *= -1
            assert box_fingerprint(changed, (0,)) != box_fingerprint(zeros, (0,))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_and_layout_has_one_fingerprint(dtype):
    for shape, origin in [((), ()), ((7,), (4093,)), ((3, 5), (1, 3)), ((0, 3), (0, 0))]:
        array = random_bits(dtype, shape)
        expected = box_fingerprint(array, origin)
        assert box_fingerprint(np.array(array, order="F"), origin) == expected
        assert (expected == 0) == (array.size == 0) or not array.view(np.uint8).any()


def test_another_process_has_other_fingerprints():
    """What would cancel here tells nobody what would cancel there."""
    program = (
        "import numpy as np; from cairn.storage.arrays.fingerprints import box_fingerprint;"
        "print(box_fingerprint(np.arange(64.0), (0,)))"
    )
    found = {
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
        for _ in range(2)
    }
    assert len({*found, f"{box_fingerprint(np.arange(64.0), (0,))}\n".encode()}) == 3
