"""Blocks of one stored array, read ahead in bounded memory."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.storage.arrays.boxes import (
    MAX_CHUNKS_PER_READ,
    READ_BYTES,
    Box,
    boxes,
    chunk_boxes,
    chunk_count,
    copy_permuted,
    read_boxes,
)
from cairn.storage.arrays.four_bits import PackedArray
from cairn.storage.reading.checked_reads import CheckedReads
from cairn.storage.reading.direct_reads import DirectReads
from cairn.storage.reading.limited_reads import LimitedReads
from cairn.storage.reading.read_ahead import asked_ahead

__all__ = ["BlockPlan", "in_flight_bytes", "stream_blocks", "stream_boxes"]

_PIECES_AHEAD = 2

_AHEAD_BYTES = 128 << 20
"""Most bytes of pieces that are read ahead; a piece has at least one chunk."""


def _pieces_ahead(chunk_bytes: int) -> int:
    """Return the number of pieces that are read ahead of the one in use."""
    return min(_PIECES_AHEAD, _AHEAD_BYTES // max(READ_BYTES, chunk_bytes))


def in_flight_bytes(chunk_bytes: int) -> int:
    """Return the bytes of all pieces in memory at a time, for an array with such chunks.

    These are the pieces read ahead, the next one, the one in use, and one that is half decoded.
    """
    return (_pieces_ahead(chunk_bytes) + 3) * max(READ_BYTES, chunk_bytes)


@dataclass(frozen=True)
class BlockPlan:
    """Plan of the blocks of an array.

    Attributes:
        window: the part of the array to read, in stored coordinates.
        chunks: the array's chunk shape.
        axes: the array's axes in the order of the result.
        axis: the axis of the result along which blocks are cut first.
        itemsize: bytes per element in memory.
        max_bytes: most bytes of a block.
    """

    window: Box
    chunks: Sequence[int]
    axes: tuple[int, ...]
    axis: int
    itemsize: int
    max_bytes: int

    @property
    def order(self) -> tuple[int, ...]:
        """The array's axes in the order in which blocks are made: the cutting axis first."""
        if not self.axes:
            return ()
        return (self.axes[self.axis], *self.axes[: self.axis], *self.axes[self.axis + 1 :])

    @property
    def as_stored(self) -> bool:
        """True if blocks are made in the order of the array's own axes."""
        return self.order == tuple(range(len(self.window)))

    def bands(self) -> Iterator[Box]:
        """Yield the boxes to read (bands), in stored coordinates; memory holds one at a time."""
        order = self.order
        cut = read_boxes(
            [self.window[i].stop - self.window[i].start for i in order],
            self.itemsize,
            self.max_bytes,
            grid=[self.chunks[i] for i in order],
            phase=[self.window[i].start % self.chunks[i] for i in order],
        )
        for box in cut:
            by_axis = dict(zip(order, box, strict=True))
            yield tuple(_shifted(by_axis[i], self.window[i].start) for i in range(len(self.window)))

    def pieces(self, band: Box) -> Iterator[Box]:
        """Yield boxes of whole chunks that make up a band, in stored coordinates and reading order.

        A band that is stored as one block is a single piece, which needs no copy.
        """
        shape = [part.stop - part.start for part in band]
        fits = math.prod(shape) * self.itemsize <= self.max_bytes
        if self.as_stored and fits and chunk_count(shape, self.chunks) < MAX_CHUNKS_PER_READ:
            yield band
            return
        yield from chunk_boxes(band, self.chunks, READ_BYTES // self.itemsize)


def stream_blocks(
    array: LimitedReads | PackedArray | CheckedReads | DirectReads,
    plan: BlockPlan,
    wait: Callable[[Any], np.ndarray],
) -> Iterator[np.ndarray]:
    """Yield the blocks of `plan`, C-contiguous, with all axes of the array.

    Memory holds one band, the pieces read ahead, and what the caller keeps of earlier bands.

    Args:
        array: the stored array.
        plan: the blocks.
        wait: returns a read's result, or raises the error that its failure means.
    """
    order = plan.order
    to_result = tuple(order.index(i) for i in plan.axes)
    ahead: deque[tuple[Box, Box, Any]] = deque()
    todo: Iterator[tuple[Box, Box]]
    todo = ((band, piece) for band in plan.bands() for piece in plan.pieces(band))
    if isinstance(array, DirectReads):
        todo = asked_ahead(
            todo,
            lambda entry: plan.itemsize * math.prod(part.stop - part.start for part in entry[1]),
            lambda entry: array.ask(entry[1]),
        )
    block: np.ndarray | None = None
    filled = 0
    most = _pieces_ahead(math.prod(plan.chunks) * plan.itemsize)
    # After the last piece come Nones, until the queue of reads under way is empty.
    for step in itertools.chain(todo, itertools.repeat(None)):
        if step is not None:
            band, piece = step
            ahead.append((band, piece, array[piece].read(order="C")))
            if len(ahead) <= most:
                continue
        if not ahead:
            return
        band, piece, future = ahead.popleft()
        data = wait(future)
        # The future holds the data as well: drop it, or the memory is not freed with `data`.
        del future
        # The piece is the whole band, in the right order: no copy.
        if piece == band and plan.as_stored:
            block, filled = data, data.size
        else:
            if block is None:
                shape = [band[i].stop - band[i].start for i in order]
                block = np.empty(shape, dtype=data.dtype)
            inside = tuple(_shifted(piece[i], -band[i].start) for i in order)
            copy_permuted(data, order, block[inside])
            filled += data.size
        del data
        if filled == block.size:
            for part in boxes(block.shape, max(1, plan.max_bytes // plan.itemsize)):
                yield np.asarray(block[part].transpose(to_result), order="C")
            block, filled = None, 0


def stream_boxes(
    array: LimitedReads | PackedArray | CheckedReads | DirectReads,
    window: Box,
    chunks: Sequence[int],
    itemsize: int,
    wait: Callable[[Any], np.ndarray],
) -> Iterator[tuple[Box, np.ndarray]]:
    """Yield each element of a part of an array once, in stored order, in pieces with their boxes.

    Nothing is combined or copied. A piece consists of whole chunks, and has at most `READ_BYTES`
    unless one chunk has more.

    Args:
        array: the stored array.
        window: the part, in stored coordinates.
        chunks: the array's chunk shape.
        itemsize: bytes per element in memory.
        wait: returns a read's result, or raises the error that its failure means.
    """
    ahead: deque[tuple[Box, Any]] = deque()

    def first() -> tuple[Box, np.ndarray]:
        box, pending = ahead.popleft()  # no name here outlives the call, which would keep memory
        return box, wait(pending)

    most = _pieces_ahead(math.prod(chunks) * itemsize)
    for box in chunk_boxes(window, chunks, READ_BYTES // itemsize):
        ahead.append((box, array[box].read(order="C")))
        if len(ahead) > most:
            yield first()
    while ahead:
        yield first()


def _shifted(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
