"""Reads of shards in an object store by ranges; each chunk is checked and put into its place.

This is `local_shards` for object stores. The step's index has the locations of shards. Chunks are
compared with their crc32c and their digest, and a shard's index with the index that such a shard
must have. TensorStore reads other arrays (compressed, packed, or of plain Orbax).

A range is streamed directly into its destination. If the stream fails, TensorStore reads the rest,
with its retries. Many requests run at the same time, each for several neighbouring chunks. A budget
of bytes bounds them: many requests run if values are small, few if they are large.
See ADR 41 and 46.
"""

import math
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cached_property, partial
from http.client import HTTPException
from typing import Any, Final, NamedTuple

import numpy as np
import tensorstore as ts

from cairn.storage.arrays.box_buffers import BoxBuffer, Index, overlap
from cairn.storage.arrays.data_files import CRC_BYTES, bytes_of, shard_index
from cairn.storage.errors import CorruptionError, as_no_answer
from cairn.storage.reading.local_shards import (
    StoredCut,
    checked_place,
    corners,
    damaged,
    ensure_saved,
)
from cairn.storage.store.deadlines import Progress, wait_for
from cairn.storage.store.gcs_ranges import GcsRanges, RangeStream
from cairn.storage.store.objects import read_context
from cairn.storage.store.requests import timed_request
from cairn.storage.store.uri import StoreURI

__all__ = [
    "BUDGET_BYTES",
    "REQUESTS",
    "REQUEST_BYTES",
    "Piece",
    "RangeReads",
    "gathered",
    "shard_pieces",
]

REQUESTS: Final = 128
"""Most requests that run at the same time."""

BUDGET_BYTES: Final = 256 << 20
"""Most bytes requested and not received yet; a larger request runs alone."""

REQUEST_BYTES: Final = 8 << 20
"""Most bytes of neighbouring pieces in one request; a larger chunk is one request."""

_GAP_BYTES: Final = 256 << 10
"""Largest gap in bytes between pieces that is read too: it costs less than another request."""


class Piece(NamedTuple):
    """Contiguous bytes of a file.

    Attributes:
        file: name of the file, relative to the item's folder.
        start: offset of the first byte.
        stop: offset behind the last byte.
        where: name of the leaf for errors.
        fill: generator that yields memory for the bytes, part by part. It is sent the number of
            bytes that were read into the part, which is smaller if the file ends early; it checks
            the bytes and copies them to their destination.
    """

    file: str
    start: int
    stop: int
    where: str
    fill: Callable[[], Generator[memoryview, int, None]]


def gathered(pieces: Sequence[Piece]) -> Iterator[list[int]]:
    """Yield groups of pieces that are close in a file, to read in one request, as indices."""
    run: list[int] = []
    stop = 0
    for number in sorted(range(len(pieces)), key=lambda position: pieces[position][:3]):
        piece = pieces[number]
        if run:
            first = pieces[run[0]]
            apart = piece.file != first.file or not 0 <= piece.start - stop <= _GAP_BYTES
            if apart or max(stop, piece.stop) - first.start > REQUEST_BYTES:
                yield run
                run = []
        stop = max(stop, piece.stop) if run else piece.stop
        run.append(number)
    if run:
        yield run


class RangeReads:
    """Reads of the files of one item. Safe for use by many threads; must be closed."""

    def __init__(self, item: StoreURI) -> None:
        """Create the reads of the item in the folder `item`."""
        self._item = item
        self._progress = Progress()
        self._ranges = GcsRanges(item) if item.scheme == "gs" else None
        self._pool = ThreadPoolExecutor(REQUESTS, "cairn-range")
        self._gate = threading.Lock()
        self._room = threading.Condition()
        self._requests = self._bytes = 0

    def close(self) -> None:
        """Wait for running requests; cancel those that have not begun."""
        self._pool.shutdown(cancel_futures=True)
        if self._ranges is not None:
            self._ranges.close()

    def start(self, pieces: Sequence[Piece]) -> list[Future[None]]:
        """Begin to read pieces, in the order of files and offsets; return a future for each.

        A future raises CorruptionError if stored data is missing or damaged, and
        StoreUnavailableError if the store gives no answer.
        """
        begun: dict[int, Future[None]] = {}
        for run in gathered(pieces):
            future = self._pool.submit(self._read, [pieces[number] for number in run])
            begun |= dict.fromkeys(run, future)
        return [begun[number] for number in range(len(pieces))]

    def _read(self, pieces: list[Piece]) -> None:
        start = pieces[0].start
        stop = max(piece.stop for piece in pieces)
        # To pop them in their order.
        pieces.reverse()
        with (
            self._within_budget(stop - start),
            closing(self._began(pieces[-1], start, stop)) as data,
        ):
            while pieces:
                piece = pieces.pop()
                data.skip_to(piece.start)
                filling = piece.fill()
                with suppress(StopIteration):
                    memory = next(filling)
                    while True:
                        memory = filling.send(data.read_into(memory))
                        self._progress.record_answer()

    def _began(self, piece: Piece, start: int, stop: int) -> "_Range":
        """Start a stream of the bytes from `start` to `stop`, and return them as a range."""
        # Without a stream, or once it fails, `_Range` reads by TensorStore, which retries.
        stream = None
        if self._ranges is not None:
            with (
                suppress(OSError, HTTPException),
                timed_request("read", f"{self._item}/{piece.file}"),
            ):
                stream = self._ranges.open(piece.file, start, stop)
        return _Range(start, stream, lambda at: self._asked(piece, at, stop))

    def _asked(self, piece: Piece, start: int, stop: int) -> bytes:
        path = f"{self._item}/{piece.file}"
        with timed_request("read", path):
            try:
                pending = self._files.read(piece.file, byte_range=slice(start, stop))
                content = wait_for(pending, self._progress)
            except (ValueError, OSError) as exc:
                if (silence := as_no_answer(exc, path=path)) is not None:
                    raise silence from exc
                raise _missing(piece, f"bytes {start} to {stop}", str(exc)) from exc
        if content.state != "value":
            raise _missing(piece, piece.file, "no such file")
        return bytes(content.value)

    @cached_property
    def _files(self) -> Any:
        return wait_for(ts.KvStore.open(self._item.kvstore_spec(), context=read_context()))

    @contextmanager
    def _within_budget(self, nbytes: int) -> Iterator[None]:
        """Reserve bytes of the budget for the context; wait, in order of calls, until they fit."""
        # The gate keeps the order: a large request is not overtaken by small ones for ever.
        with self._gate, self._room:
            # A request above the whole budget begins when no other runs.
            self._room.wait_for(lambda: self._requests == 0 or self._bytes + nbytes <= BUDGET_BYTES)
            self._requests += 1
            self._bytes += nbytes
        try:
            yield
        finally:
            with self._room:
                self._requests -= 1
                self._bytes -= nbytes
                self._room.notify_all()


class _Range:
    """Consecutive bytes of a file: from a stream, and from TensorStore once that fails."""

    def __init__(
        self, start: int, stream: RangeStream | None, rest: Callable[[int], bytes]
    ) -> None:
        """Begin at the offset `start`; `rest` returns all bytes from an offset on."""
        self._at, self._stream, self._rest = start, stream, rest
        self._asked: memoryview | None = None

    def skip_to(self, start: int) -> None:
        """Skip the bytes before an offset of the file."""
        while self._at < start and self.read_into(memoryview(bytearray(start - self._at))):
            pass

    def read_into(self, memory: memoryview) -> int:
        """Fill memory with the next bytes; return their number, fewer at the file's end."""
        filled = 0
        if self._stream is not None:
            filled = self._stream.read_into(memory)
            self._at += filled
            if filled == len(memory):
                return filled
            self.close()
        if self._asked is None:
            self._asked = memoryview(self._rest(self._at))
        part = self._asked[: len(memory) - filled]
        memory[filled : filled + len(part)] = part
        self._asked = self._asked[len(part) :]
        self._at += len(part)
        return filled + len(part)

    def close(self) -> None:
        """Stop the stream without waiting for the rest."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def _missing(piece: Piece, expected: str, actual: str) -> CorruptionError:
    return CorruptionError(
        "stored data of a leaf is missing",
        path=piece.where,
        expected=expected,
        found=" ".join(actual.split())[:400],
        next_step="Restore the step's files, or use another step.",
    )


_Touched = tuple[int, Index, list[BoxBuffer]]
"""Chunk of a shard: its number in stored order, its origin, and the regions that it fills."""


def shard_pieces(array: StoredCut, origin: Index, regions: Sequence[BoxBuffer]) -> Iterator[Piece]:
    """Yield the pieces whose reads fill the parts of the regions that lie in one outer shard.

    Args:
        array: the array; it must have `place`.
        origin: index of the shard's first element.
        regions: regions of the array's stored dtype; each has a part in the shard.

    Raises:
        CorruptionError: the shard does not exist, or has the wrong size.
    """
    assert array.place is not None
    ref = checked_place(array, origin, array.place)
    size = math.prod(array.cut.chunk) * array.dtype.itemsize + CRC_BYTES
    for run in _runs(array, origin, regions, size):
        start = ref.offset + run[0][0] * size
        fill = partial(_fill, array, run)
        yield Piece(ref.file, start, start + len(run) * size, array.where, fill)
    # The index is not needed to find chunks of equal size. It is compared because other readers
    # use it.
    index = shard_index(*array.cut, array.dtype.itemsize)
    stop = ref.offset + ref.length
    fill = partial(_fill_index, array, origin, index)
    yield Piece(ref.file, stop - len(index), stop, array.where, fill)


def _runs(
    array: StoredCut, origin: Index, regions: Sequence[BoxBuffer], size: int
) -> Iterator[list[_Touched]]:
    """Yield groups of consecutive chunks that overlap with a region."""
    chunk = array.cut.chunk
    run: list[_Touched] = []
    for number, at in corners(array.cut.shard, chunk, origin):
        touching = [box for box in regions if overlap(at, chunk, box.origin, box.values.shape)]
        if not touching:
            continue
        if run and (number != run[-1][0] + 1 or (len(run) + 1) * size > REQUEST_BYTES):
            yield run
            run = []
        run.append((number, at, touching))
    if run:
        yield run


def _fill(array: StoredCut, run: list[_Touched]) -> Generator[memoryview, int, None]:
    """Yield memory for consecutive chunks; check each and copy it to its destination."""
    chunk = array.cut.chunk
    nbytes = math.prod(chunk) * array.dtype.itemsize
    crc = bytearray(CRC_BYTES)
    for _, at, regions in run:
        place = _place(at, chunk, regions)
        values = np.empty(chunk, array.dtype) if place is None else place
        count = yield memoryview(bytes_of(values))
        count += yield memoryview(crc)
        if count != nbytes + CRC_BYTES:
            raise damaged(array, at, f"{nbytes + CRC_BYTES} bytes", f"{count} before the end")
        ensure_saved(array, at, values, bytes(crc))
        if place is not None:
            continue
        for region in regions:
            shared = overlap(at, chunk, region.origin, region.values.shape)
            if shared is not None:
                region.part(shared.second)[...] = values[shared.first]


def _place(at: Index, chunk: Index, regions: Sequence[BoxBuffer]) -> np.ndarray | None:
    """Return the memory that a chunk can be read into directly; None if there is none."""
    if len(regions) != 1:
        return None
    shared = overlap(at, chunk, regions[0].origin, regions[0].values.shape)
    if shared is None:
        return None
    place = regions[0].part(shared.second)
    return place if place.shape == chunk and place.flags.c_contiguous else None


def _fill_index(
    array: StoredCut, origin: Index, expected: bytes
) -> Generator[memoryview, int, None]:
    buffer = bytearray(len(expected))
    yield memoryview(buffer)
    if buffer != expected:
        raise damaged(array, origin, "the index of its shard", "another")
