"""Shapes of the shards and chunks of stored arrays. See ADR 0003.

An array is stored as outer shards (a device's box, at most 64 MiB) that are divided into inner
chunks of about 4 MiB. Reading any element costs its whole inner chunk, checksum included.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

__all__ = [
    "CHUNK_BYTES",
    "MIN_CHUNK_BYTES",
    "SHARD_BYTES",
    "SQUARE_ABOVE_BYTES",
    "ChunkShapes",
    "inner_chunk_shape",
    "outer_shard_shape",
]

CHUNK_BYTES: Final = 4 << 20
"""Maximum size of an inner chunk in bytes, where the shard's divisors allow it."""

MIN_CHUNK_BYTES: Final = 16 << 10
"""Minimum size of a chunk in bytes: each chunk costs 20 bytes and some microseconds.

A raveled model whose size has a large prime factor has no divisor near `CHUNK_BYTES`; its chunks
are larger instead.
"""

SHARD_BYTES: Final = 64 << 20
"""Maximum size of an outer shard, where the divisors allow it: shards are written, and uploaded,
whole."""

SQUARE_ABOVE_BYTES: Final = 64 << 20
"""Size in bytes up to which chunks are strips of rows; larger arrays have square chunks.

Readers load smaller arrays whole.
"""


class ChunkShapes(NamedTuple):
    """Shapes of an array's shards and chunks.

    Attributes:
        shard: outer shape, in elements per axis.
        chunk: inner shape; divides `shard`.
    """

    shard: tuple[int, ...]
    chunk: tuple[int, ...]


def outer_shard_shape(part_shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the shape of the outer shards into which a writer's box is divided, by leading axes.

    Args:
        part_shape: shape of that box, no axis of size 0.
        itemsize: bytes per element as stored.
    """
    part = tuple(int(size) for size in part_shape)
    limit = max(1, SHARD_BYTES // itemsize)
    if math.prod(part) <= limit:
        return part
    return _contiguous_chunk(part, limit, MIN_CHUNK_BYTES // itemsize)


def inner_chunk_shape(
    global_shape: Sequence[int], shard_shape: Sequence[int], itemsize: int, *, square: bool = True
) -> tuple[int, ...]:
    """Return the shape of a shard's chunks: it divides the shard, within `CHUNK_BYTES`.

    If every such shape is below `MIN_CHUNK_BYTES`, this returns the next larger one that divides.

    Arrays of at most `SQUARE_ABOVE_BYTES`, and all if not `square`, are divided along leading axes
    only: such a chunk is contiguous in memory, and needs no copy to be written. Larger arrays get
    chunks that are roughly square in the last two axes, so that blocks of rows and blocks of
    columns both touch few chunks.

    Args:
        global_shape: shape of the whole array, no axis of size 0.
        shard_shape: shape of one outer shard.
        itemsize: bytes per element as stored.
        square: False for arrays that are not read by columns.
    """
    shard = tuple(int(size) for size in shard_shape)
    limit, least = max(1, CHUNK_BYTES // itemsize), MIN_CHUNK_BYTES // itemsize
    if math.prod(shard) <= limit:
        return shard
    if square and len(shard) > 1 and math.prod(global_shape) * itemsize > SQUARE_ABOVE_BYTES:
        rows, columns = _square_chunk(shard[-2], shard[-1], limit)
        if rows * columns >= least:
            return (*(1 for _ in shard[:-2]), rows, columns)
    return _contiguous_chunk(shard, limit, least)


def _contiguous_chunk(shard: tuple[int, ...], limit: int, least: int) -> tuple[int, ...]:
    """Return a contiguous chunk's shape: trailing axes whole, one axis in part, leading axes 1."""
    chunk = [1] * len(shard)
    filled = 1
    for axis in reversed(range(len(shard))):
        part = _largest_divisor(shard[axis], limit // filled)
        if filled * part < least and part < shard[axis]:
            part = min(divisor for divisor in _divisors(shard[axis]) if divisor > part)
        chunk[axis] = part
        filled *= part
        if part < shard[axis]:
            break
    return tuple(chunk)


def _square_chunk(rows: int, columns: int, limit: int) -> tuple[int, int]:
    """Return (a, b) that divide (rows, columns), with a * b <= limit.

    Only the largest b for each a is considered. Of these pairs, those with at least half the
    largest area are kept; the one with the smallest ratio of sides is returned.
    """
    pairs = [(a, _largest_divisor(columns, limit // a)) for a in _divisors(rows) if a <= limit]
    fullest = max(a * b for a, b in pairs)
    full_enough = [pair for pair in pairs if 2 * pair[0] * pair[1] >= fullest]
    return min(full_enough, key=lambda pair: (max(pair) / min(pair), -pair[0] * pair[1]))


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in _divisors(number) if divisor <= max(1, limit))


@lru_cache(maxsize=4096)
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))
