"""Fingerprints: what a save tells unchanged leaves by, where digests can be made to agree."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.storage.arrays.data_files import bytes_of
from cairn.storage.arrays.digests import box_digest
from cairn.storage.arrays.fingerprints import fingerprint
from cairn.storage.store.checksums import splitmix64
from tests.faults.report import trials
from tests.storage.arrays.test_digests import cut_arrays

MODULUS = 2**64
SHAPE = (1024, 1024)
"""A chunk of float32, as most are."""


def of(values):
    return fingerprint(bytes_of(np.ascontiguousarray(values)))


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


@settings(deadline=None)
@given(cut_arrays(), st.integers(1, 127), st.data())
def test_any_change_of_one_element_changes_the_fingerprint(case, change, data):
    array = case[0]
    at = tuple(data.draw(st.integers(0, size - 1)) for size in array.shape)
    small = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}
    bits = small.get(array.dtype.name, 7)
    changed = array.copy()
    element = np.array(array[at]).reshape(1).view(np.uint8)
    element[data.draw(st.integers(0, array.itemsize - 1))] ^= change % (2**bits - 1) + 1
    changed[at] = element.view(array.dtype)[0]
    if changed.tobytes() != array.tobytes():  # setting a signalling NaN may quiet it
        assert of(changed) != of(array)


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
    digest, print_ = box_digest(values, (0, 0)), of(values)
    for pair in pairs[:: trials(short=25, long=5)]:
        changed = with_signs_changed(values, pair)
        assert box_digest(changed, (0, 0)) == digest
        assert of(changed) != print_


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
    for _ in range(10):
        values = numbers.integers(1, 9, 512).astype(kind)
        i, j = numbers.choice(512, 2, replace=False)
        values[i], values[j] = 4, 6
        changed = values.copy()
        CHANGES[change](changed, i, j)
        assert changed.tobytes() != values.tobytes()
        assert of(changed) != of(values)


def test_zeros_that_become_negative_are_seen():
    for count in (1, 2, 3, 4096):
        for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
            zeros = np.zeros(4096, dtype)
            changed = zeros.copy()
            changed[:count] *= -1
            assert of(changed) != of(zeros)


def test_another_process_has_other_fingerprints():
    """What would cancel here tells nobody what would cancel there."""
    program = "from cairn.storage.arrays.fingerprints import fingerprint; print(fingerprint(b'a'))"
    found = {
        subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout
        for _ in range(2)
    }
    assert len({*found, f"{fingerprint(b'a')}\n".encode()}) == 3
