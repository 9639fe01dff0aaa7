"""The crc32c of bytes put together from the crc32c of parts, without reading the bytes again.

A crc is linear over GF(2): what the bytes behind a part make of its crc is a matrix that depends on
their number alone. Pure, no JAX.

Source: zlib, `crc32_combine` (M. Adler), with Castagnoli's polynomial.
"""

from functools import lru_cache
from typing import Final

__all__ = ["CHECKED_PART", "combined"]

CHECKED_PART: Final = 0x48674BC7
"""The crc32c of any bytes with their own crc32c, little endian, behind them."""

_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli's, its bits reversed."""

Matrix = tuple[int, ...]


def combined(first: int, second: int, length: int) -> int:
    """The crc32c of two parts together.

    Args:
        first: crc32c of the first part.
        second: crc32c of the second.
        length: bytes of the second.
    """
    return _times(_after(length), first) ^ second


@lru_cache(maxsize=4096)
def _after(length: int) -> Matrix:
    """What `length` bytes of zeros do to a crc."""
    whole = _identity()
    step = _squared(_squared(_squared(_one_bit())))  # eight bits
    while length:
        if length & 1:
            whole = tuple(_times(step, row) for row in whole)
        step = _squared(step)
        length >>= 1
    return whole


def _identity() -> Matrix:
    return tuple(1 << bit for bit in range(32))


def _one_bit() -> Matrix:
    return (_POLYNOMIAL, *(1 << bit for bit in range(31)))


def _squared(matrix: Matrix) -> Matrix:
    return tuple(_times(matrix, row) for row in matrix)


def _times(matrix: Matrix, vector: int) -> int:
    found = 0
    for row in matrix:
        if vector & 1:
            found ^= row
        vector >>= 1
    return found
