"""Reads of shards on a local disk directly into their destination, each byte checked.

A chunk whose destination is contiguous memory is not copied. Chunks are compared with their crc32c
and their digest, and a shard's index with the index that such a shard must have. TensorStore reads
other arrays (in object stores, or of plain Orbax). See ADR 0011.
"""

import itertools
import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.storage.arrays.box_buffers import BoxBuffer, Index, overlap
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_files import (
    CRC_BYTES,
    bytes_of,
    crc_bytes,
    shard_index,
    stored_bytes,
)
from cairn.storage.arrays.digests import box_digest
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.errors import CorruptionError, translate_error
from cairn.storage.reading.databases import database_entries
from cairn.storage.reading.read_ahead import ask
from cairn.storage.store.disk.confinement import open_below
from cairn.storage.store.disk.direct_io import read_into
from cairn.storage.store.uri import StoreURI

__all__ = [
    "RUN_BYTES",
    "LocalShards",
    "StoredCut",
    "WholeChunk",
    "checked_place",
    "corners",
    "damaged",
    "ensure_saved",
]

# Buffers of one preadv, two for each chunk; Linux takes at most 1024 (IOV_MAX).
_BUFFERS_AT_ONCE: Final = 512

RUN_BYTES: Final = 4 << 20
"""Most bytes of small chunks that are read in one call."""

_GAP_BYTES: Final = 64 << 10
"""Largest gap in bytes between chunks that is read too: it costs less than another call."""

_NEXT_STEP: Final = "Restore the step's files, or use another step."


class StoredCut(NamedTuple):
    """Stored layout of an array, and how to check it.

    Attributes:
        name: Orbax's name of the array.
        dtype: stored dtype.
        cut: outer shards and inner chunks.
        expected: returns a chunk's digest, by its index in the array's grid of chunks.
        where: name of the leaf for errors.
        place: returns a shard's location, by its index in the grid of shards; None: locations must
            be read from the item's database.
    """

    name: str
    dtype: np.dtype[Any]
    cut: ChunkShapes
    expected: Callable[[Index], int | None]
    where: str
    place: Callable[[Index], ValueRef | None] | None = None


class WholeChunk(NamedTuple):
    """Shard that is one chunk, and whose destination is contiguous memory.

    Attributes:
        array: the array.
        region: destination of the chunk: memory of the stored dtype, in C order, and of the chunk's
            shape.
    """

    array: StoredCut
    region: BoxBuffer


class _Chunk(NamedTuple):
    """Chunk to read: its origin, the regions that it fills, and the memory that it is read into."""

    origin: Index
    regions: list[BoxBuffer]
    values: np.ndarray[Any, Any]
    in_place: bool
    crc: bytearray


class LocalShards:
    """Arrays of one item on a local disk. Safe for use by many threads."""

    def __init__(self, item: StoreURI) -> None:
        """Create the reads of the item in the folder `item`."""
        self._item = item
        self._index: dict[str, ValueRef] | None = None
        self._lock = threading.Lock()

    def read(self, array: StoredCut, origin: Index, regions: Sequence[BoxBuffer]) -> None:
        """Fill the parts of the regions that lie in one outer shard.

        Args:
            array: the array.
            origin: index of the shard's first element.
            regions: regions of the array's stored dtype; each has a part in the shard.

        Raises:
            CorruptionError: stored bytes are missing, or are not what was saved.
        """
        ref = self._ref(array, origin)
        # All chunks have this size and lie one after another, each followed by its crc32c.
        data = math.prod(array.cut.chunk) * array.dtype.itemsize
        with self._opened(ref.file, array) as file:
            for run in _runs(self._chunks(array, origin, regions)):
                number = run[0][0]
                self._read_run(array, file, ref.offset + number * (data + CRC_BYTES), run)
            # The index is not needed to find chunks of equal size. It is compared because other
            # readers use it.
            expected = shard_index(*array.cut, array.dtype.itemsize)
            at = ref.offset + ref.length - len(expected)
            if os.pread(file, len(expected), at) != expected:
                raise damaged(array, origin, "the index of its shard", "another")

    def read_whole(self, chunks: Sequence[WholeChunk]) -> None:
        """Fill the regions of many small chunks; neighbours are read in one call.

        Raises:
            CorruptionError: stored bytes are missing, or are not what was saved.
        """
        placed = [(self._ref(whole.array, whole.region.origin), whole) for whole in chunks]
        # By file and offset: neighbours are read in one call.
        placed.sort(key=lambda pair: pair[0][:2])
        for name, group in itertools.groupby(placed, key=lambda pair: pair[0].file):
            within = list(group)
            with self._opened(name, within[0][1].array) as file:
                for run in _near(within):
                    start = run[0][0].offset
                    last = run[-1][0]
                    buffer = bytearray(last.offset + last.length - start)
                    stored = memoryview(buffer)[: read_into(file, [buffer], start)]
                    for ref, whole in run:
                        at = ref.offset - start
                        _take(whole, stored[at : at + ref.length], ref.length)

    def ask(self, array: StoredCut, origin: Index, region: BoxBuffer) -> None:
        """Have the disk read ahead the part of a region that lies in an outer shard.

        Args:
            array: the array.
            origin: index of the shard's first element.
            region: a region with a part in the shard; its values are not changed.

        Raises:
            CorruptionError: the shard or its file does not exist.
        """
        shard, chunk = array.cut
        ref = self._ref(array, origin)
        numbers = [
            number
            for number, at in corners(shard, chunk, origin)
            if overlap(at, chunk, region.origin, region.values.shape)
        ]
        if not numbers:
            return
        step = math.prod(chunk) * array.dtype.itemsize + CRC_BYTES
        first, last = numbers[0], numbers[-1]
        with self._opened(ref.file, array) as file:
            ask(file, [(ref.offset + first * step, (last + 1 - first) * step)])

    def _chunks(
        self, array: StoredCut, origin: Index, regions: Sequence[BoxBuffer]
    ) -> Iterator[tuple[int, _Chunk]]:
        """Yield the chunks of a shard that touch a region, with their numbers in stored order."""
        shard, chunk = array.cut
        for number, at in corners(shard, chunk, origin):
            touching = [
                (region, shared)
                for region in regions
                if (shared := overlap(at, chunk, region.origin, region.values.shape))
            ]
            if not touching:
                continue
            place = None
            if len(touching) == 1:
                region, shared = touching[0]
                place = region.part(shared.second)
            # The destination is one contiguous chunk: read directly into it.
            if place is not None and place.shape == chunk and place.flags.c_contiguous:
                yield number, _Chunk(at, [], place, in_place=True, crc=bytearray(CRC_BYTES))
                continue
            values = np.empty(chunk, array.dtype)
            filled = [region for region, _ in touching]
            yield number, _Chunk(at, filled, values, in_place=False, crc=bytearray(CRC_BYTES))

    def _read_run(
        self, array: StoredCut, file: int, offset: int, run: list[tuple[int, _Chunk]]
    ) -> None:
        """Read consecutive chunks, check each, and copy those that were not read in place."""
        buffers: list[memoryview | bytearray] = []
        for _, chunk in run:
            buffers += (bytes_of(chunk.values), chunk.crc)
        expected = sum(map(len, buffers))
        count = read_into(file, buffers, offset)
        if count != expected:
            raise damaged(array, run[0][1].origin, f"{expected} bytes", f"{count} before the end")
        for _, chunk in run:
            ensure_saved(array, chunk.origin, chunk.values, bytes(chunk.crc))
            for region in chunk.regions:
                shared = overlap(
                    chunk.origin, chunk.values.shape, region.origin, region.values.shape
                )
                if shared is not None:
                    region.part(shared.second)[...] = chunk.values[shared.first]

    def _ref(self, array: StoredCut, origin: Index) -> ValueRef:
        return checked_place(array, origin, array.place or partial(self._stored, array))

    def _stored(self, array: StoredCut, cell: Index) -> ValueRef | None:
        """Return a shard's location according to the item's database; None if it has none."""
        with self._lock:
            if self._index is None:
                self._index = self._read_index()
        return self._index.get("/".join([array.name, "c", *map(str, cell)]))

    def _read_index(self) -> dict[str, ValueRef]:
        try:
            entries = database_entries(self._item)
        except ValueError as exc:
            raise CorruptionError(
                "the index of an item's arrays is missing or damaged",
                path=self._item,
                expected="an OCDBT database",
                found=" ".join(str(exc).split())[:400],
                next_step=_NEXT_STEP,
            ) from exc
        return {key: entry for key, entry in entries.items() if isinstance(entry, ValueRef)}

    @contextmanager
    def _opened(self, name: str, array: StoredCut) -> Iterator[int]:
        """Open a data file for a while; an item may have more files than a process may open."""
        try:
            file = open_below(self._item, name)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as exc:
            raise CorruptionError(
                "stored data of a leaf is missing",
                path=array.where,
                expected=name,
                found="no such file",
                next_step=_NEXT_STEP,
            ) from exc
        except OSError as exc:
            raise translate_error(exc, path=array.where) from exc
        try:
            yield file
        finally:
            os.close(file)


def checked_place(
    array: StoredCut, origin: Index, place: Callable[[Index], ValueRef | None]
) -> ValueRef:
    """Return a shard's location.

    Args:
        array: the array of the shard.
        origin: index of the shard's first element.
        place: as in `StoredCut`.

    Raises:
        CorruptionError: the shard does not exist, or has the wrong size.
    """
    ref = place(tuple(map(operator.floordiv, origin, array.cut.shard)))
    if ref is None:
        raise damaged(array, origin, "a stored shard", "none")
    expected = stored_bytes(*array.cut, array.dtype.itemsize)
    if ref.length != expected:
        raise damaged(array, origin, f"a shard of {expected} bytes", f"{ref.length} bytes")
    return ref


def ensure_saved(array: StoredCut, origin: Index, values: np.ndarray[Any, Any], crc: bytes) -> None:
    """Raise CorruptionError unless a chunk is what was saved.

    Args:
        array: the array of the chunk.
        origin: index of the chunk's first element.
        values: the chunk's elements.
        crc: the chunk's stored crc32c.

    Raises:
        CorruptionError: its crc32c or its digest differs.
    """
    checksum = crc_bytes(bytes_of(values))
    if checksum != crc:
        raise damaged(array, origin, f"crc32c {crc.hex()}", f"crc32c {checksum.hex()}")
    index = tuple(a // n for a, n in zip(origin, array.cut.chunk, strict=True))
    digest = box_digest(values, origin)
    expected = array.expected(index)
    if digest != expected:
        raise damaged(array, origin, f"digest {expected}", f"digest {digest}")


def corners(shard: Index, chunk: Index, origin: Index) -> Iterator[tuple[int, Index]]:
    """Yield the number of each chunk of a shard, in stored order, and its first element's index."""
    ranges = (range(0, size, step) for size, step in zip(shard, chunk, strict=True))
    for number, corner in enumerate(itertools.product(*ranges)):
        yield number, tuple(a + b for a, b in zip(origin, corner, strict=True))


def _near(
    placed: Iterable[tuple[ValueRef, WholeChunk]],
) -> Iterator[list[tuple[ValueRef, WholeChunk]]]:
    """Yield groups of chunks of a file, sorted by offset, to read with one call, gaps included."""
    run: list[tuple[ValueRef, WholeChunk]] = []
    for ref, whole in placed:
        if run:
            first, last = run[0][0], run[-1][0]
            apart = ref.offset - last.offset - last.length
            if apart > _GAP_BYTES or ref.offset + ref.length - first.offset > RUN_BYTES:
                yield run
                run = []
        run.append((ref, whole))
    if run:
        yield run


def _take(whole: WholeChunk, stored: memoryview, length: int) -> None:
    """Copy a chunk to its destination and check it there.

    Args:
        whole: the chunk.
        stored: value of its shard; shorter than `length` if the file ends early.
        length: length in bytes that the value must have.
    """
    array, (origin, values) = whole
    size = values.nbytes
    if len(stored) < length:
        raise damaged(array, origin, f"{length} bytes", f"{len(stored)} before the end")
    data, sums = stored[:size], stored[size:]
    bytes_of(values)[:] = data
    ensure_saved(array, origin, values, bytes(sums[:CRC_BYTES]))
    if sums[CRC_BYTES:] != shard_index(*array.cut, values.itemsize):
        raise damaged(array, origin, "the index of its shard", "another")


def _runs(chunks: Iterable[tuple[int, _Chunk]]) -> Iterator[list[tuple[int, _Chunk]]]:
    """Yield groups of chunks that lie one after another."""
    run: list[tuple[int, _Chunk]] = []
    for numbered in chunks:
        if run and (numbered[0] != run[-1][0] + 1 or 2 * len(run) >= _BUFFERS_AT_ONCE):
            yield run
            run = []
        run.append(numbered)
    if run:
        yield run


def damaged(array: StoredCut, origin: Index, expected: str, found: str) -> CorruptionError:
    """Return the error for a damaged chunk, named by its first element's index."""
    index = [a // n for a, n in zip(origin, array.cut.chunk, strict=True)]
    return CorruptionError(
        "stored data of a leaf is not what was saved",
        path=f"{array.where}, chunk {index}",
        expected=expected,
        found=found,
        next_step=_NEXT_STEP,
    )
