"""Floating dtypes, from their names or from dtypes of NumPy and JAX."""

from typing import Any

import ml_dtypes
import numpy as np

from cairn.interop.errors import ArgumentError

__all__ = ["floating_dtype"]


def floating_dtype(value: Any, *, argument: str) -> np.dtype[Any]:
    """Return a floating dtype; its name may be one of `ml_dtypes`, such as "bfloat16".

    Args:
        value: a dtype, anything that `numpy.dtype` accepts, or a name.
        argument: name of the caller's argument, for the error.

    Raises:
        ArgumentError: `value` is no dtype, or not a floating one.
    """
    dtype: np.dtype[Any] | None = None
    try:
        # `numpy.dtype(None)` is float64.
        if value is not None:
            named = getattr(ml_dtypes, value, value) if isinstance(value, str) else value
            dtype = np.dtype(named)
        ml_dtypes.finfo(dtype)
        if dtype is not None and dtype.kind == "c":
            raise ValueError("complex")
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            path=argument,
            expected="a floating dtype",
            found=repr(value) if dtype is None else dtype.name,
            next_step="give one such as float32, float16 or bfloat16",
        ) from error
    assert dtype is not None
    return dtype
