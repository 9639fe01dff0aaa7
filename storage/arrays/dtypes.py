"""NumPy dtypes by name, those of `ml_dtypes` included."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from cairn.storage.errors import UnsupportedFormatError

__all__ = ["dtype_named", "is_floating"]


@functools.lru_cache(maxsize=256)
def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype that is called `name`, such as "bfloat16", "int4" or "float32".

    Raises:
        UnsupportedFormatError: there is no such dtype.
    """
    extended = getattr(ml_dtypes, name, None)
    try:
        return np.dtype(name if extended is None else extended)
    except TypeError as exc:
        raise UnsupportedFormatError(
            "unknown dtype",
            path=repr(name),
            expected="a dtype of NumPy or ml_dtypes",
            found="none of that name",
            next_step="Upgrade Cairn to the release that wrote it, or a later one.",
        ) from exc


def is_floating(dtype: DTypeLike) -> bool:
    """Return True if the dtype is floating and not complex; dtypes of `ml_dtypes` are included."""
    numpy_dtype: np.dtype[Any] = np.dtype(dtype)
    try:
        ml_dtypes.finfo(numpy_dtype)
    except ValueError:
        return False
    return numpy_dtype.kind != "c"
