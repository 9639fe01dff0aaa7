"""Two checksums of files: a crc32c that is combined from parts, and a sum over the content.

**crc32c.** A crc is linear over GF(2): appending bytes multiplies the crc by a matrix that depends
only on their number. So the crc32c of a file follows from that of its parts, without reading the
bytes again. Source: zlib, `crc32_combine` (M. Adler), with Castagnoli's polynomial.

**ContentSum** distinguishes contents that crc32c can't. If each part of a file ends in its own
crc32c, the crc32c of the file depends on the lengths of the parts alone: after a part and its
crc32c the register's state does not depend on the part. Files of array values consist of such
parts, and so do the nodes of OCDBT; one swapped for another keeps the file's crc32c. The crc32c
finds a change within a part; this sum identifies which part it is.

    sum over i of word[i] x low(i % 512) x high(i // 512), modulo 2**64
    low(n) = splitmix64(n) | 1        high(n) = (2 n + 1) x 0x9E3779B97F4A7C15

over the little-endian 64-bit words of the file, with zeros after its end. Every key is odd, so a
change in one word always changes the sum; two swapped words change it but for a chance in 2**64. It
takes a fraction of the time of reading the bytes.
"""

import functools
from typing import Any, Final

import numpy as np

__all__ = ["CRC_AND_DATA_CRC32C", "ContentSum", "combine_crc32c", "splitmix64"]

CRC_AND_DATA_CRC32C: Final = 0x48674BC7
"""The crc32c of any bytes followed by their own crc32c (little endian): a constant."""

_POLYNOMIAL: Final = 0x82F63B78
"""Castagnoli's polynomial, bits reversed."""

_WORD: Final = 8
_ROW: Final = 512
_FACTOR: Final = 0x9E3779B97F4A7C15
_MASK: Final = 2**64 - 1
_SMALL: Final = 64

Words = np.ndarray[Any, np.dtype[np.uint64]]
Matrix = tuple[int, ...]


def combine_crc32c(first: int, second: int, length: int) -> int:
    """Return the crc32c of two parts together.

    Args:
        first: crc32c of the first part.
        second: crc32c of the second part.
        length: length of the second part in bytes.
    """
    return _times(_after(length), first) ^ second


@functools.lru_cache(maxsize=4096)
def _after(length: int) -> Matrix:
    """Return the matrix that `length` zero bytes apply to a crc."""
    whole = tuple(1 << bit for bit in range(32))  # the identity
    one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    step = _squared(_squared(_squared(one_bit)))  # eight bits
    while length:
        if length & 1:
            whole = tuple(_times(step, row) for row in whole)
        step = _squared(step)
        length >>= 1
    return whole


def _squared(matrix: Matrix) -> Matrix:
    return tuple(_times(matrix, row) for row in matrix)


def _times(matrix: Matrix, vector: int) -> int:
    product = 0
    for row in matrix:
        if vector & 1:
            product ^= row
        vector >>= 1
    return product


def splitmix64(state: int) -> int:
    """Return the output of splitmix64 (Steele, Lea, Flood 2014) for a state."""
    mixed = (state + 0x9E3779B97F4A7C15) & _MASK
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _MASK
    return mixed ^ (mixed >> 31)


class ContentSum:
    """Content sum of bytes that arrive piece by piece; see the module for the formula."""

    def __init__(self) -> None:
        self._total = 0
        self._words = 0
        self._rest = b""

    def update(self, data: bytes | bytearray | memoryview | np.ndarray) -> None:
        """Add the next bytes, of any number; multiples of 8 bytes are the fastest."""
        if len(data) <= _SMALL:
            self._add_small(bytes(data))
            return
        octets = np.frombuffer(data, np.uint8)
        if self._rest:
            missing = _WORD - len(self._rest)
            self._add_small(octets[:missing].tobytes())
            octets = octets[missing:]
        whole = len(octets) - len(octets) % _WORD
        self._add(octets[:whole].view("<u8"))
        self._rest = octets[whole:].tobytes()

    def text(self) -> str:
        """Return the sum as it is recorded: "words-64:" and 16 hexadecimal digits."""
        total = self._total
        if self._rest:
            total += int.from_bytes(self._rest, "little") * _key(self._words)
        return f"words-64:{total & _MASK:016x}"

    def _add_small(self, data: bytes) -> None:
        data = self._rest + data
        while len(data) >= _WORD:
            word = int.from_bytes(data[:_WORD], "little")
            self._total = (self._total + word * _key(self._words)) & _MASK
            self._words += 1
            data = data[_WORD:]
        self._rest = data

    def _add(self, words: Words) -> None:
        first = min(len(words), -self._words % _ROW)  # completes the current row
        rows = (len(words) - first) // _ROW
        last = first + rows * _ROW
        self._add_part(words[:first])
        if rows:
            sums = np.einsum("ij,j->i", words[first:last].reshape(rows, _ROW), _low())
            before = self._words // _ROW
            numbers = np.arange(before, before + rows, dtype=np.uint64)
            high = numbers * np.uint64(2 * _FACTOR & _MASK) + np.uint64(_FACTOR)
            self._total += int(np.dot(sums, high))
            self._words += rows * _ROW
        self._add_part(words[last:])
        self._total &= _MASK

    def _add_part(self, words: Words) -> None:
        """Add words that all lie in one row."""
        if len(words):
            start = self._words % _ROW
            total = int(np.dot(words, _low()[start : start + len(words)]))
            self._total += total * _high_key(self._words // _ROW)
            self._words += len(words)


@functools.cache
def _low() -> Words:
    return np.array([splitmix64(number) | 1 for number in range(_ROW)], np.uint64)


def _high_key(row: int) -> int:
    return (2 * row + 1) * _FACTOR & _MASK


def _key(word: int) -> int:
    return int(_low()[word % _ROW]) * _high_key(word // _ROW) & _MASK
