"""Four-bit integers, two per byte: packing, unpacking, and partial reads.

An array is packed along one axis of even size: elements 2i and 2i+1 are the low and the high half
of byte i; negative numbers are in two's complement. See ADR 0007.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from cairn.storage.arrays.dtypes import dtype_named

__all__ = [
    "FOUR_BITS",
    "PackedArray",
    "pack",
    "packed_axis",
    "packed_shape",
    "packing_axis",
    "unpack",
    "unpacked_shape",
]

FOUR_BITS: Final = frozenset({"int4", "uint4"})
"""Dtypes that are packed."""


def packing_axis(shard_shape: Sequence[int]) -> int | None:
    """Return the last axis along which every shard holds whole bytes; None if there is none.

    Args:
        shard_shape: shape of one device's shard.
    """
    even = [axis for axis, size in enumerate(shard_shape) if size and size % 2 == 0]
    return even[-1] if even else None


def packed_axis(shape: Sequence[int], stored_shape: Sequence[int]) -> int:
    """Return the axis that was packed to store `shape` as `stored_shape`.

    Raises:
        ValueError: `stored_shape` is not `shape` with one axis halved.
    """
    for axis in range(len(shape)):
        if packed_shape(shape, axis) == tuple(stored_shape):
            return axis
    raise ValueError(f"{tuple(stored_shape)} is not {tuple(shape)} with one axis halved")


def packed_shape(shape: Sequence[int], axis: int) -> tuple[int, ...]:
    """Return the shape with one axis halved."""
    return (*shape[:axis], shape[axis] // 2, *shape[axis + 1 :])


def unpacked_shape(stored: Sequence[int], axis: int) -> tuple[int, ...]:
    """Convert a shape, or an index, from packed bytes to elements."""
    return (*stored[:axis], 2 * stored[axis], *stored[axis + 1 :])


def pack(values: Any, axis: int) -> Any:
    """Return a four-bit array of NumPy or JAX packed into bytes along `axis`."""
    # Through int8, which gives NumPy's two's complement of negative numbers.
    wide = np.int8 if np.dtype(values.dtype).name == "int4" else np.uint8
    codes = values.astype(wide).view(np.uint8) & np.uint8(15)
    shape = tuple(values.shape)
    pairs = codes.reshape(*packed_shape(shape, axis)[: axis + 1], 2, *shape[axis + 1 :])
    before = (slice(None),) * (axis + 1)
    return pairs[(*before, 0)] | (pairs[(*before, 1)] << np.uint8(4))


def unpack(packed: Any, dtype: str, axis: int, *, numpy: Any = np) -> Any:
    """Return the four-bit array whose bytes `pack` returned.

    Args:
        packed: the bytes.
        dtype: name of the four-bit dtype.
        axis: axis along which they are packed.
        numpy: module of the bytes, `numpy` or `jax.numpy`.
    """
    codes = numpy.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=axis + 1)
    shape = tuple(packed.shape)
    whole = codes.reshape(*shape[:axis], 2 * shape[axis], *shape[axis + 1 :])
    if dtype == "int4":
        whole = (whole ^ np.uint8(8)).view(np.int8) - np.int8(8)
    return whole.astype(dtype_named(dtype))


class PackedArray:
    """Adapter that indexes a stored array of packed bytes as the four-bit array."""

    def __init__(self, array: Any, dtype: str, axis: int) -> None:
        """Wrap a TensorStore array.

        Args:
            array: the stored array of bytes.
            dtype: name of the four-bit dtype.
            axis: axis along which they are packed.
        """
        self._array, self._dtype, self._axis = array, dtype, axis

    def __getitem__(self, index: tuple[int | slice, ...]) -> _PackedRead:
        """Return a part to read; `index` has a non-negative integer or bounded slice per axis."""
        part = index[self._axis]
        low, high = (part.start, part.stop) if isinstance(part, slice) else (part, part + 1)
        outer = slice(low // 2, -(-high // 2))
        # TensorStore slices the other axes. The packed axis, and axes that integers drop, are
        # indexed after the read.
        stored = tuple(
            slice(axis_index, axis_index + 1) if isinstance(axis_index, int) else axis_index
            for axis_index in (*index[: self._axis], outer, *index[self._axis + 1 :])
        )
        start = low - 2 * outer.start
        inner = slice(start, start + high - low, part.step) if isinstance(part, slice) else start
        after = tuple(0 if isinstance(axis_index, int) else slice(None) for axis_index in index)
        select = (*after[: self._axis], inner, *after[self._axis + 1 :])
        return _PackedRead(self._array[stored], self._dtype, self._axis, select)


class _PackedRead:
    """Part of a packed array; `read` starts the read and returns the object to wait for."""

    def __init__(self, part: Any, dtype: str, axis: int, select: tuple[int | slice, ...]) -> None:
        self._part, self._dtype, self._axis, self._select = part, dtype, axis, select
        self._future: Any = None

    def read(self, order: str = "C") -> _PackedRead:
        """Start the read, and return this part."""
        self._future = self._part.read(order=order)
        return self

    def result(self) -> np.ndarray[Any, np.dtype[Any]]:
        """Wait for the read and return the part."""
        whole = unpack(self._future.result(), self._dtype, self._axis)
        return np.ascontiguousarray(whole[self._select])
