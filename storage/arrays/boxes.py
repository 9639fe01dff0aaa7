"""Plans of bounded reads: the boxes of an array, in reading order. No I/O.

A *box* is a tuple of slices with non-negative bounds. Boxes come in C order and cover the array
once, so that the concatenation of their flattened contents is the flattened array.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np

Box = tuple[slice, ...]

# Rows of chunks up to this size are read whole and handed out in slices, so that each chunk is
# decoded once. Larger rows are not: memory must not grow with the model.
MAX_CHUNK_ROW_BYTES = 64 << 20

READ_BYTES = 8 << 20
"""Bytes per TensorStore read: a few chunks, decoded in parallel. Larger reads cost memory (its
threads keep some of what they free) and gain no speed; smaller ones are slower."""

MAX_CHUNKS_PER_READ = 64 << 10
"""Chunks per TensorStore read: its plan takes some hundred bytes for each."""

# Size of a tile to transpose: it and its transpose fit the L2 cache. Against strips of 16 rows this
# is 1.4 times as fast for float32, twice for bfloat16 (measured; 64 and 256 rows are slower).
_TILE_ROWS, _TILE_COLUMNS = 128, 256
_THIN = 16
# Padding between the rows of a tile: rows that are a power of two apart share few cache sets.
_PADDING = 64
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_FLOAT32 = np.dtype(np.float32)
_LARGE_BYTES = 4 << 20
"""Size in bytes from which several threads share a copy."""
_THREADS = min(16, os.cpu_count() or 1)


def boxes(
    shape: Sequence[int],
    limit: int,
    *,
    grid: Sequence[int] | None = None,
    phase: Sequence[int] | None = None,
) -> Iterator[Box]:
    """Divide an array into C-order boxes of at most `limit` elements each.

    Args:
        shape: Shape of the array. A zero-size array has no boxes; a 0-d array has one, `()`.
        limit: Elements per box, at least 1.
        grid: Chunk shape. Cuts fall on chunk borders wherever a whole chunk fits in `limit`.
        phase: Position of the array's origin inside its first chunk, per axis.
    """
    shape = tuple(shape)
    grid = tuple(grid) if grid is not None else (1,) * len(shape)
    phase = tuple(phase) if phase is not None else (0,) * len(shape)
    if 0 in shape:
        return
    if not shape:
        yield ()
        return
    axis = split_axis(shape, limit)
    rows = max(1, limit // math.prod(shape[axis + 1 :]))
    tail = tuple(slice(0, size) for size in shape[axis + 1 :])
    for head in itertools.product(*(range(size) for size in shape[:axis])):
        fixed = tuple(slice(i, i + 1) for i in head)
        start = 0
        while start < shape[axis]:
            border = (start + phase[axis] + rows) // grid[axis] * grid[axis] - phase[axis]
            stop = min(shape[axis], border if border > start else start + rows)
            yield (*fixed, slice(start, stop), *tail)
            start = stop


def read_boxes(
    shape: Sequence[int],
    itemsize: int,
    max_bytes: int,
    *,
    grid: Sequence[int],
    phase: Sequence[int] | None = None,
) -> Iterator[Box]:
    """Divide an array into boxes to read at once, so that few chunks are decoded twice.

    A band holds whole rows of chunks: as many as fit in `max_bytes`, or one of at most
    `MAX_CHUNK_ROW_BYTES`. A larger row of chunks is read in parts, and its chunks are decoded once
    per part.

    Args:
        shape: Shape of the array.
        itemsize: Bytes per element in memory.
        max_bytes: Memory that the caller has for a band.
        grid: Chunk shape.
        phase: Position of the array's origin inside its first chunk, per axis.
    """
    shape = tuple(shape)
    small = max(1, max_bytes // itemsize)
    large = max(small, MAX_CHUNK_ROW_BYTES // itemsize)
    if 0 in shape or not shape:
        yield from boxes(shape, small)
        return
    axis = split_axis(shape, small)
    chunk_row = min(grid[axis], shape[axis]) * math.prod(shape[axis + 1 :])
    leading = (min(size, chunk) for size, chunk in zip(shape[:axis], grid, strict=False))
    if chunk_row <= small and all(size == 1 for size in leading):
        yield from boxes(shape, small, grid=grid, phase=phase)
        return
    axis = split_axis(shape, large)
    chunk_row = min(grid[axis], shape[axis]) * math.prod(shape[axis + 1 :])
    yield from boxes(shape, min(large, chunk_row), grid=grid, phase=phase)


def chunk_count(shape: Sequence[int], chunks: Sequence[int]) -> int:
    """Return the number of chunks of an array of this shape."""
    return math.prod(-(-size // (chunk or 1)) for size, chunk in zip(shape, chunks, strict=True))


def chunk_boxes(window: Box, chunks: Sequence[int], limit: int) -> Iterator[Box]:
    """Divide a box of an array into boxes of whole chunks, each chunk in one of them.

    Args:
        window: the box, in the array's coordinates; the boxes end where it does.
        chunks: chunk shape, no size 0.
        limit: maximum number of elements in the chunks of a box, unless one chunk has more. No box
            has more than `MAX_CHUNKS_PER_READ` chunks.
    """
    if any(part.start >= part.stop for part in window):
        return
    firsts = [part.start // chunk for part, chunk in zip(window, chunks, strict=True)]
    counts = [
        -(-part.stop // chunk) - first
        for part, chunk, first in zip(window, chunks, firsts, strict=True)
    ]
    for box in boxes(counts, max(1, min(MAX_CHUNKS_PER_READ, limit // math.prod(chunks)))):
        yield tuple(
            slice(
                max(part.start, (first + cut.start) * chunk),
                min(part.stop, (first + cut.stop) * chunk),
            )
            for part, chunk, first, cut in zip(window, chunks, firsts, box, strict=True)
        )


def split_axis(shape: Sequence[int], limit: int) -> int:
    """Return the first axis along which one index has at most `limit` (>= 1) elements."""
    return next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= limit)


def fill(out: np.ndarray, values: np.ndarray) -> None:
    """Set `out` to `values`, cast as NumPy does it, with as many threads as there are cores.

    Values whose last two axes are swapped in memory, as in the transpose of an array, are copied in
    tiles.

    Args:
        out: array of the same shape as `values`, in C order.
        values: array with any memory order.
    """
    swapped = (*range(values.ndim - 2), values.ndim - 1, values.ndim - 2)
    turned = values.ndim > 1 and abs(values.strides[-2]) < abs(values.strides[-1])
    source, axes = (values.transpose(swapped), swapped) if turned else (values, (*range(out.ndim),))
    axis = next((number for number, size in enumerate(out.shape) if size > 1), None)
    if out.nbytes < _LARGE_BYTES or axis is None:
        copy_permuted(source, axes, out)
        return
    there = axes[axis]  # the same axis of the source
    count = min(_THREADS, out.shape[axis])
    steps = [out.shape[axis] * part // count for part in range(count + 1)]

    def copy(part: int) -> None:
        cut = slice(steps[part], steps[part + 1])
        whole = slice(None)
        copy_permuted(source[(*[whole] * there, cut)], axes, out[(*[whole] * axis, cut)])

    with ThreadPoolExecutor(count, "cairn-fill") as pool:
        list(pool.map(copy, range(count)))


def copy_permuted(source: np.ndarray, axes: Sequence[int], out: np.ndarray) -> None:
    """Copy `source`, its axes permuted as by `np.transpose`, into `out`, cast as in NumPy.

    The usual case, a swap of the last two axes, uses tiles that fit the cache.
    """
    axes = tuple(axes)
    # NumPy copies ml_dtypes element by element; as integers of the same width they copy fast.
    width = _UNSIGNED.get(source.dtype.itemsize)
    if width is not None and source.dtype == out.dtype:
        source, out = source.view(width), out.view(width)
    identity = tuple(range(source.ndim))
    if axes != identity and axes == (*identity[:-2], identity[-1], identity[-2]):
        for head in np.ndindex(*source.shape[:-2]):
            _transpose_in_tiles(source[head], out[head])
    else:
        _cast(out, source.transpose(axes))


def _cast(out: np.ndarray, values: np.ndarray) -> None:
    """Set `out` to `values`, cast to its dtype."""
    # By bits: NumPy's cast would call ml_dtypes for each element.
    if (values.dtype, out.dtype) == (_BFLOAT16, _FLOAT32):
        np.left_shift(values.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        np.copyto(out, values, casting="unsafe")


def _transpose_in_tiles(source: np.ndarray, out: np.ndarray) -> None:
    """Set `out` to the transpose of `source`, tile by tile, so that whole cache lines are used."""
    if min(source.shape) < _THIN:
        _cast(out, source.T)
        return
    # Cast while rows are contiguous; the transposition then moves bits only.
    bits = _UNSIGNED.get(out.itemsize, out.dtype)
    padded = _TILE_COLUMNS + _PADDING // out.itemsize
    tile = np.empty((_TILE_ROWS, padded), out.dtype)
    turned = np.empty((_TILE_COLUMNS, _TILE_ROWS), bits)
    out = out.view(bits)
    for row in range(0, source.shape[0], _TILE_ROWS):
        for column in range(0, source.shape[1], _TILE_COLUMNS):
            part = source[row : row + _TILE_ROWS, column : column + _TILE_COLUMNS]
            rows, columns = part.shape
            cast = tile[:rows, :columns]
            _cast(cast, part)
            turned[:columns, :rows] = cast.view(bits).T
            out[column : column + columns, row : row + rows] = turned[:columns, :rows]
