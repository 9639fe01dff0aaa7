"""NaNs and infinities are counted whatever the dtype."""

import ml_dtypes
import numpy as np
import pytest

from cairn.interop.conversion.finite import count_nonfinite

DTYPES = [
    np.float16,
    np.float32,
    np.float64,
    np.complex64,
    ml_dtypes.bfloat16,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e8m0fnu,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_as_many_are_counted_as_numpy_finds(dtype):
    numbers = np.random.default_rng(0)
    raw = numbers.integers(0, 256, 24_000, dtype=np.uint8).view(dtype)
    with np.errstate(invalid="ignore"):
        bad = ~np.isfinite(raw.astype(np.complex128))
    assert count_nonfinite(raw) == np.count_nonzero(bad) > 0
    assert count_nonfinite(np.ones((7, 5), dtype)) == 0


def test_the_largest_and_the_smallest_numbers_are_finite():
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        limits = ml_dtypes.finfo(dtype)
        block = np.array([limits.max, limits.min, limits.tiny, -0.0, 0.0], dtype)
        assert count_nonfinite(block) == 0
        assert count_nonfinite(np.array([np.nan, -np.nan, np.inf, -np.inf], dtype)) == 4


@pytest.mark.parametrize("block", [np.arange(3), np.zeros((0, 4)), np.array([True]), np.array(7)])
def test_what_has_no_such_numbers_has_none(block):
    assert count_nonfinite(block) == 0
