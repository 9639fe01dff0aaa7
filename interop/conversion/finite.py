"""Count of the NaN and infinite elements of a block, as fast as memory can be read."""

from __future__ import annotations

from functools import cache
from typing import Final

import ml_dtypes
import numpy as np

from cairn.interop.conversion.ops import Array

__all__ = ["count_nonfinite"]

_AT_ONCE: Final = 1 << 16
"""Elements counted at a time, so that intermediate arrays stay in the processor's cache."""


def count_nonfinite(block: Array) -> int:
    """Return how many elements are NaN or infinite; 0 for dtypes that are not floating.

    Args:
        block: an array of any shape in C order; it may have an 8-bit or 16-bit dtype of ml_dtypes.
    """
    if block.dtype.kind == "c":
        return count_nonfinite(block.view(block.real.dtype))
    if not block.size or block.dtype.kind in "biuSU":
        return 0
    flat = np.ascontiguousarray(block).reshape(-1)
    blocks = (flat[start : start + _AT_ONCE] for start in range(0, flat.size, _AT_ONCE))
    return sum(map(_count, blocks))


def _count(block: Array) -> int:
    if block.dtype in (np.float32, np.float64):
        finite = np.isfinite(block)
        return 0 if finite.all() else int(np.count_nonzero(~finite))
    bits = block.view(f"u{block.dtype.itemsize}")
    if block.dtype.itemsize == 1:
        return int(np.count_nonzero(_bad_bytes(block.dtype)[bits]))
    # In IEEE 754 exactly NaN and infinities have all bits of the exponent set.
    mask = bits.dtype.type(_exponent_bits(block.dtype))
    exponents = np.bitwise_and(bits, mask)
    if exponents.max() != mask:
        return 0
    return int(np.count_nonzero(exponents == mask))


@cache
def _exponent_bits(dtype: np.dtype) -> int:
    return int(np.asarray(np.inf, dtype).view(f"u{dtype.itemsize}"))


@cache
def _bad_bytes(dtype: np.dtype) -> Array:
    """Return 256 booleans: which values of a byte are NaN or infinite in a dtype."""
    values = np.arange(256, dtype=np.uint8).view(dtype)
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return np.zeros(256, np.bool_)
    return ~np.isfinite(values.astype(np.float32))
