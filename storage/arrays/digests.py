"""Digests of arrays that do not depend on their chunking: "keyed-sum-64".

The digest is the sum of (bits of an element) x (key of its position), modulo 2**64. A position is
an element's index in the whole leaf, so the digests of disjoint boxes add up to that of the leaf.
Every key is odd, so a change of one element always changes the sum. See ADR 0008.

The key of an index is the product over axes d of high_d(index[d] // 4096) x
low_d(index[d] % 4096), where high_d(j) is splitmix64(splitmix64(2 d) + j) | 1, and low_d(j) the
same with 2 d + 1: two factors make the keys of a long axis cheap. The last axis counts 32-bit
words: the bits of an element are shifted to their place in the word, little endian; elements of 8
and 16 bytes are 2 and 4 words. An element below one byte counts as one byte, with zeros above its
bits. An array without axes counts as one of shape (1,); one without elements has the digest 0.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import queue
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np

from cairn.storage.arrays.boxes import boxes
from cairn.storage.store.checksums import splitmix64

__all__ = [
    "ALGORITHM",
    "box_digest",
    "digest_chunks",
    "digest_text",
    "parse_digest",
    "total",
]

ALGORITHM: Final = "keyed-sum-64"

_MASK: Final = 2**64 - 1
_WORD: Final = 4
"""Size of a word in bytes."""

_LOW: Final = 4096
_KEYS: Final = 1 << 14
"""Number of keys in memory at a time, so that keys and words fit the cache."""

_FEW: Final = 1024
"""Number of words up to which a leaf is summed with all its keys at once.

For fewer words, planning would take longer than the sum.
"""


_NARROW: Final = 32
"""Number of words below which rows are summed along columns."""

_PAIRED_ROWS: Final = 8
"""Number of rows from which words are summed in pairs.

For fewer rows, computing the keys of pairs costs more time than it saves.
"""

WORDS_AT_ONCE: Final = 1 << 17
"""Number of 64-bit words in a scratch array, which fits the cache.

Smaller arrays are slower with several threads, as every NumPy call releases and takes the GIL.
"""

_COPIED: Final = 1 << 20
"""Number of bytes that are copied at a time, of elements that are not laid out in whole words."""

_UNSIGNED: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_BELOW_A_BYTE: Final = re.compile(r"(?:u?int|float)([1-7])(?:_|$)")
_TEXT: Final = re.compile(rf"{ALGORITHM}:([0-9a-f]{{16}})")

Words = np.ndarray[Any, np.dtype[Any]]
Digests = np.ndarray[Any, np.dtype[np.uint64]]

_scratch: Final[queue.SimpleQueue[Digests]] = queue.SimpleQueue()
"""Free scratch arrays, for reuse: page faults of new memory would take as long as the sum."""


def box_digest(values: np.ndarray, origin: Sequence[int]) -> int:
    """Return the digest of a box of a leaf.

    Uses at most some 3 MiB beside the box.

    Args:
        values: the box's elements, in native byte order.
        origin: index of its first element in the leaf.
    """
    if values.size == 0:
        return 0
    if values.ndim == 0:
        values, origin = values.reshape(1), (0,)
    size = values.itemsize
    has_whole_words = (values.shape[-1] * size) % _WORD == 0 and (origin[-1] * size) % _WORD == 0
    if has_whole_words and _bits(values.dtype) >= 8 and values.strides[-1] == size:
        return _words_sum(values.view(np.uint32), _word_origin(values, origin))
    digest = 0
    for box in boxes(values.shape, max(1, _COPIED // size)):
        part = values[box]
        at = [start + cut.start for start, cut in zip(origin, box, strict=True)]
        digest += _words_sum(_padded(part, at), _word_origin(part, at))
    return digest & _MASK


def digest_chunks(values: np.ndarray, origin: Sequence[int], chunk: Sequence[int]) -> Digests:
    """Return the digests of the chunks of a box, by chunk index.

    Args:
        values: the box's elements.
        origin: index of its first element in the leaf: a corner of a chunk.
        chunk: shape of a chunk; the last ones of an axis may be smaller.
    """
    counts = [-(-size // step) for size, step in zip(values.shape, chunk, strict=True)]
    digests = np.zeros(counts, np.uint64)
    for index in itertools.product(*map(range, counts)):
        first = [number * step for number, step in zip(index, chunk, strict=True)]
        part = values[tuple(slice(a, a + step) for a, step in zip(first, chunk, strict=True))]
        digests[index] = box_digest(part, [a + b for a, b in zip(origin, first, strict=True)])
    return digests


def total(digests: np.ndarray) -> int:
    """Return the digest of the union of boxes with these digests."""
    return int(np.sum(digests, dtype=np.uint64))


def digest_text(value: int) -> str:
    """Return a digest as text, as records have it."""
    return f"{ALGORITHM}:{value:016x}"


def parse_digest(text: str) -> int | None:
    """Return the digest of a text of `digest_text`; None if it is of another algorithm."""
    match = _TEXT.fullmatch(text)
    return int(match[1], 16) if match else None


def _padded(values: np.ndarray, origin: Sequence[int]) -> Words:
    """Return a copy of the box as rows of words, with zeros in the bytes outside the box."""
    size, bits = values.itemsize, _bits(values.dtype)
    before = origin[-1] * size % _WORD
    row = values.shape[-1] * size
    words = -(-(before + row) // _WORD)
    copy = np.zeros((*values.shape[:-1], words * _WORD), np.uint8)
    # NumPy copies ml_dtypes element by element; as integers they copy at full speed.
    as_type = _UNSIGNED.get(size, values.dtype)
    into, source = copy[..., before : before + row].view(as_type), values.view(as_type)
    if values.shape[-1] < _NARROW:
        for column in range(values.shape[-1]):
            into[..., column] = source[..., column]
    else:
        into[...] = source
    if bits < 8:
        copy &= np.uint8(2**bits - 1)
    return copy.view(np.uint32)


def _word_origin(values: np.ndarray, origin: Sequence[int]) -> tuple[int, ...]:
    return (*origin[:-1], origin[-1] * values.itemsize // _WORD)


@lru_cache(maxsize=64)
def _bits(dtype: np.dtype[Any]) -> int:
    """Return the number of an element's significant bits: below 8 for dtypes below one byte."""
    match = _BELOW_A_BYTE.match(dtype.name)
    return int(match[1]) if match else 8 * dtype.itemsize


def _words_sum(words: Words, origin: tuple[int, ...]) -> int:
    """Return the keyed sum of rows of words.

    A row spans as many trailing axes as have at most `_KEYS` keys together. All rows are summed
    with the same keys; their sums are then summed with the keys of the leading axes.
    """
    shape = words.shape
    if words.size <= _FEW and words.flags.c_contiguous:
        return int(_row_sums(words.reshape(1, -1), _keys(0, origin, shape))[0])
    first = next(
        (axis for axis in range(len(shape)) if math.prod(shape[axis:]) <= _KEYS), len(shape) - 1
    )
    columns = math.prod(shape[first:])
    narrow = columns < _NARROW
    # Rows that do not follow one another in memory may be copied, as narrow ones are.
    together = words.flags.c_contiguous and not narrow
    rows_at_once = _KEYS if together else max(1, _COPIED // _WORD // columns)
    total_sum = 0
    for box in boxes(shape[:first], min(_KEYS, rows_at_once)):
        starts = [origin[axis] + part.start for axis, part in enumerate(box)]
        row_keys = _keys(0, tuple(starts), tuple(part.stop - part.start for part in box))
        rows = words[box].reshape(len(row_keys), columns)
        if narrow and len(rows) > columns:
            keys = _keys(first, origin[first:], shape[first:])
            total_sum += _dot(_row_sums(np.ascontiguousarray(rows.T), row_keys), keys)
            continue
        for start in range(0, columns, _KEYS):
            part = rows[:, start : start + _KEYS]
            if columns <= _KEYS:
                keys = _keys(first, origin[first:], shape[first:])
            else:
                keys = _keys(first, (origin[first] + start,), (part.shape[1],))
            total_sum += _dot(_row_sums(part, keys), row_keys)
    return total_sum & _MASK


def _row_sums(rows: Words, keys: Digests) -> Digests:
    """Return the keyed sum of each row; pairs of words as 64-bit integers are a third faster.

    A pair w = first + 2**32 second must contribute first k + second l. That equals
    w k + second (l - 2**32 k), modulo 2**64, so that no word has to be widened first.
    """
    count, columns = rows.shape
    before = rows.ctypes.data % 8
    paired = columns % 2 == 0 and rows.strides[1] == rows.itemsize and rows.strides[0] % 8 == 0
    sums: Digests
    if count < _PAIRED_ROWS or not paired or before not in (0, 4):
        sums = np.einsum("ij,j->i", rows, keys, dtype=np.uint64, casting="unsafe")
        return sums
    if before:  # pairs start at the second word; the first and the last are summed apart
        ends, between = slice(None, None, columns - 1), slice(1, columns - 1)
        sums = np.einsum("ij,j->i", rows[:, ends], keys[ends], dtype=np.uint64, casting="unsafe")
        return sums + _row_sums(rows[:, between], keys[between]) if columns > 2 else sums
    pairs, half = rows.view(np.uint64), np.uint64(32)
    of_pairs = np.ascontiguousarray(keys[0::2])
    of_second = keys[1::2] - (of_pairs << half)
    sums = np.einsum("ij,j->i", pairs, of_pairs)
    at_once = min(count, max(1, WORDS_AT_ONCE // pairs.shape[1]))
    with scratch(at_once, pairs.shape[1]) as shifted:
        for start in range(0, count, at_once):
            part = pairs[start : start + at_once]
            second = np.right_shift(part, half, out=shifted[: len(part)])
            sums[start : start + at_once] += np.einsum("ij,j->i", second, of_second)
    return sums


@contextlib.contextmanager
def scratch(rows: int, columns: int) -> Iterator[Words]:
    """Yield a scratch array of 64-bit words, at most `WORDS_AT_ONCE`, with arbitrary contents."""
    count = rows * columns
    try:
        memory = _scratch.get_nowait() if count > _KEYS else np.empty(count, np.uint64)
    except queue.Empty:
        memory = np.empty(WORDS_AT_ONCE, np.uint64)
    yield memory[:count].reshape(rows, columns)
    if count > _KEYS:
        _scratch.put(memory)


def _dot(sums: Digests, keys: Digests) -> int:
    return int(np.einsum("i,i->", sums, keys))


@lru_cache(maxsize=8)
def _keys(axis: int, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Digests:
    """Return the keys of a box of the axes from `axis` on, flattened; at most `_KEYS` keys."""
    if not starts:
        return np.ones(1, np.uint64)
    product = _axis_keys(axis, starts[0], sizes[0])
    for number in range(1, len(starts)):
        keys = _axis_keys(axis + number, starts[number], sizes[number])
        product = (product[:, np.newaxis] * keys).reshape(-1)
    product.setflags(write=False)
    return product


def _axis_keys(axis: int, start: int, size: int) -> Digests:
    first, last = start // _LOW, (start + size - 1) // _LOW
    high = [_high_key(axis, block) for block in range(first, last + 1)]
    low = _low_keys(axis)
    skipped = start - first * _LOW
    if first == last:
        return low[skipped : skipped + size] * np.uint64(high[0])
    keys = np.array(high, np.uint64)[:, np.newaxis] * low
    return keys.reshape(-1)[skipped : skipped + size]


@lru_cache(maxsize=256)
def _high_key(axis: int, block: int) -> int:
    return splitmix64(splitmix64(2 * axis) + block) | 1


@lru_cache(maxsize=16)
def _low_keys(axis: int) -> Digests:
    first = splitmix64(2 * axis + 1)
    return np.array([splitmix64(first + number) | 1 for number in range(_LOW)], np.uint64)
