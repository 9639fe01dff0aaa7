"""Write arrays as the value files of an OCDBT database: from memory to the store in one pass.

Each outer shard of an array becomes one value: its inner chunks one after another, a crc32c behind
each, and an index (zarr's `sharding_indexed`, index at the end). What is written are the arrays'
own bytes, unless they are to be compressed. In the same pass every chunk gets its digest and every
file its crc32c. Imports no JAX. See ADR 0009.

Source: zarr v3 specification, codecs `sharding_indexed` 1.0, `bytes` 1.0, `zstd` and `crc32c` 1.0.
"""

import functools
import itertools
import math
import queue
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, Literal, NamedTuple

import google_crc32c
import numpy as np

from cairn.storage.arrays.chunk_digests import DigestedBox
from cairn.storage.arrays.digests import box_digest
from cairn.storage.arrays.fingerprints import fingerprint
from cairn.storage.arrays.four_bits import unpack, unpacked_shape
from cairn.storage.arrays.ocdbt import VALUE_FOLDER, ValueRef
from cairn.storage.arrays.value_sinks import Pieces, ValueSink
from cairn.storage.store import CHECKED_PART, ContentSum, combined

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

__all__ = [
    "CRC_BYTES",
    "Compression",
    "Fingerprints",
    "ShardToWrite",
    "StoredFile",
    "WrittenFile",
    "bytes_of",
    "codecs",
    "crc_bytes",
    "has_fingerprints",
    "shard_index",
    "stored_bytes",
    "stored_file",
    "write_value_files",
]

Compression = Literal["zstd"]
"""How the chunks of an array can be compressed."""

CRC_BYTES: Final = 4
"""Behind each chunk."""

_INDEX_ENTRY_BYTES: Final = 16

_ZSTD_LEVEL: Final = 1
"""Higher ones take much longer for floats, and save hardly more."""


Fingerprints = tuple[int, ...]
"""Of the chunks of a shard, in the order in which they are stored."""


class ShardToWrite(NamedTuple):
    """One outer shard of an array.

    Attributes:
        key: its key in the database.
        path: the leaf's path.
        values: the elements, as they are stored.
        origin: index of the first one in the stored array.
        chunk: shape of an inner chunk; divides that of `values`.
        packed: (dtype, axis) of a leaf that is stored two elements in a byte, else None.
        compression: of each chunk.
        fingerprinted: whether its chunks get fingerprints as they are written.
    """

    key: bytes
    path: str
    values: np.ndarray[Any, Any]
    origin: tuple[int, ...]
    chunk: tuple[int, ...]
    packed: tuple[str, int] | None = None
    compression: Compression | None = None
    fingerprinted: bool = False

    @property
    def stored_bytes(self) -> int:
        """Length of the value, if it is not compressed."""
        return stored_bytes(self.values.shape, self.chunk, self.values.itemsize)


def stored_bytes(shard: Sequence[int], chunk: Sequence[int], itemsize: int) -> int:
    """Length of a shard's value: data, checksums and index."""
    chunks = math.prod(size // step for size, step in zip(shard, chunk, strict=True))
    data = math.prod(shard) * itemsize
    return data + chunks * (CRC_BYTES + _INDEX_ENTRY_BYTES) + CRC_BYTES


def codecs(compression: Compression | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What zarr calls the encoding: of the inner chunks, and of the index behind them."""
    octets = {"name": "bytes", "configuration": {"endian": "little"}}
    crc = {"name": "crc32c"}
    if compression is None:
        return [octets, crc], [octets, crc]
    packing = {"name": "zstd", "configuration": {"level": _ZSTD_LEVEL, "checksum": False}}
    return [octets, packing, crc], [octets, crc]


def bytes_of(values: np.ndarray[Any, Any]) -> memoryview:
    """The memory of an array that lies in one piece, in C order."""
    return values.reshape(-1).view(np.uint8).data


def crc_bytes(data: bytes | memoryview) -> bytes:
    """The crc32c of some bytes, as it is stored."""
    checksum: int = google_crc32c.value(_array(data))
    return checksum.to_bytes(CRC_BYTES, "little")


def _array(data: bytes | memoryview) -> Any:
    """What google_crc32c takes: bytes, or an array."""
    return data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)


@functools.lru_cache(maxsize=1024)
def shard_index(shard: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> bytes:
    """The last bytes of a shard's value: (offset, length) of each chunk, and their crc32c."""
    chunks = math.prod(size // step for size, step in zip(shard, chunk, strict=True))
    return _index_of([math.prod(chunk) * itemsize + CRC_BYTES] * chunks)


def _index_of(lengths: Sequence[int]) -> bytes:
    """Of chunks of these lengths, one after another."""
    pairs = np.empty((len(lengths), 2), "<u8")
    pairs[:, 1] = lengths
    pairs[:, 0] = np.cumsum(pairs[:, 1]) - pairs[:, 1]
    table = pairs.tobytes()
    return table + crc_bytes(table)


class StoredFile(NamedTuple):
    """A file as it was written.

    Attributes:
        name: path relative to the folder that it is told of.
        size: bytes.
        crc32c: eight hexadecimal digits.
        content: what `ContentSum.text` gave.
    """

    name: str
    size: int
    crc32c: str
    content: str


def stored_file(name: str, data: bytes) -> StoredFile:
    """What a file of these bytes is."""
    content = ContentSum()
    content.update(data)
    return StoredFile(name, len(data), f"{google_crc32c.value(data):08x}", content.text())


class WrittenFile(NamedTuple):
    """A value file that is durable.

    Attributes:
        record: its name below the database's folder, size and checksum.
        refs: by key, where the values lie.
        boxes: by key, the leaf's path and the digests of the chunks.
        fingerprints: by key, of the chunks of shards that were to get them.
    """

    record: StoredFile
    refs: dict[bytes, ValueRef]
    boxes: dict[bytes, tuple[str, DigestedBox]]
    fingerprints: dict[bytes, Fingerprints]


def write_value_files(
    sink: ValueSink, shards: Iterable[ShardToWrite], *, stopped: Callable[[], bool] = bool
) -> list[WrittenFile]:
    """Write all shards, several files at a time; returns once all are durable.

    Shards are let go of as they are written.

    Args:
        sink: where to.
        shards: what to write, in the order in which it is likely to be read.
        stopped: asked between files; True makes this return early.

    Raises:
        OSError: the disk is full, or failed.
        StoreUnavailableError: the store gives no answer.
    """
    jobs: queue.SimpleQueue[list[ShardToWrite]] = queue.SimpleQueue()
    for batch in _batches(shards, sink.file_bytes):
        jobs.put(batch)
    written: list[tuple[WrittenFile, Future[None]]] = []
    failed = threading.Event()

    def work() -> None:
        while not failed.is_set() and not stopped():
            try:
                batch = jobs.get_nowait()
            except queue.Empty:
                return
            try:
                written.append(_write_file(sink, batch))
            except BaseException:
                failed.set()
                raise

    with ThreadPoolExecutor(sink.writers, thread_name_prefix="cairn-write") as pool:
        workers = [pool.submit(work) for _ in range(min(sink.writers, max(1, jobs.qsize())))]
    durable = [future for _, future in written]
    wait(durable)
    for future in (*workers, *durable):
        future.result()
    return [file for file, _ in written]


def _batches(shards: Iterable[ShardToWrite], limit: int) -> Iterator[list[ShardToWrite]]:
    """Consecutive shards that go into one file."""
    batch: list[ShardToWrite] = []
    size = 0
    for shard in shards:
        if batch and size + shard.stored_bytes > limit:
            yield batch
            batch, size = [], 0
        batch.append(shard)
        size += shard.stored_bytes
    if batch:
        yield batch


def _write_file(sink: ValueSink, batch: list[ShardToWrite]) -> tuple[WrittenFile, "Future[None]"]:
    name = f"{VALUE_FOLDER}/{secrets.token_hex(16)}"
    refs: dict[bytes, ValueRef] = {}
    boxes: dict[bytes, tuple[str, DigestedBox]] = {}
    fingerprints: dict[bytes, Fingerprints] = {}
    content = ContentSum()
    file = _Written()

    def pieces() -> Pieces:
        for shard in batch:
            start = file.size
            digests: list[int] = []
            prints: list[int] = []
            yield from _encoded(shard, file, digests, prints)
            refs[shard.key] = ValueRef(name, start, file.size - start)
            boxes[shard.key] = (shard.path, _digested(shard, digests))
            if shard.fingerprinted:
                fingerprints[shard.key] = tuple(prints)

    expected = sum(shard.stored_bytes for shard in batch)
    durable = sink.write(name, pieces(), content, expected)
    record = StoredFile(name, file.size, f"{file.crc:08x}", content.text())
    return WrittenFile(record, refs, boxes, fingerprints), durable


class _Written:
    """The size and the crc32c of a file so far, whose parts each end in their own crc32c.

    Attributes:
        size: bytes.
        crc: crc32c of them.
    """

    size = crc = 0

    def add(self, length: int) -> None:
        """A part of so many bytes follows, its crc32c among them."""
        self.crc = combined(self.crc, CHECKED_PART, length)
        self.size += length


def _encoded(shard: ShardToWrite, file: _Written, digests: list[int], prints: list[int]) -> Pieces:
    """The value: each chunk and its crc32c, then the index and its.

    Appends the chunks' digests, and their fingerprints if they get any: all are those of the bytes
    that are written, whatever becomes of the array meanwhile.
    """
    lengths: list[int] = []
    for origin, part in _placed_chunks(shard):
        if shard.compression is None:
            memory = yield part.nbytes + CRC_BYTES
            data = memory[:-CRC_BYTES]
            _copy_and_sum(part, data, shard, origin, digests, prints)
            memory[-CRC_BYTES:] = crc_bytes(data)
        else:
            data = memoryview(bytearray(part.nbytes))
            _copy_and_sum(part, data, shard, origin, digests, prints)
            packed = zstd.compress(data, _ZSTD_LEVEL)
            memory = yield len(packed) + CRC_BYTES
            memory[:] = packed + crc_bytes(packed)
        lengths.append(len(memory))
        file.add(len(memory))
    index = (
        shard_index(shard.values.shape, shard.chunk, shard.values.itemsize)
        if shard.compression is None
        else _index_of(lengths)
    )
    memory = yield len(index)
    memory[:] = index
    file.add(len(index))


def _copy_and_sum(
    part: np.ndarray[Any, Any],
    data: memoryview,
    shard: ShardToWrite,
    origin: tuple[int, ...],
    digests: list[int],
    prints: list[int],
) -> None:
    """Put a chunk into memory, and tell its digest, and its fingerprint if it gets one."""
    octets = np.frombuffer(data, np.uint8)
    chunk = octets.view(part.dtype).reshape(part.shape)
    if part.flags.c_contiguous:
        octets[:] = part.reshape(-1).view(np.uint8)
    else:
        chunk[...] = part
    digests.append(_digest(chunk, origin, shard.packed))
    if shard.fingerprinted:
        prints.append(fingerprint(data))


def _placed_chunks(
    shard: ShardToWrite,
) -> Iterator[tuple[tuple[int, ...], np.ndarray[Any, np.dtype[Any]]]]:
    """Every chunk in C order, with the index of its first element in the stored array."""
    sizes = zip(shard.values.shape, shard.chunk, strict=True)
    for corner in itertools.product(*(range(0, size, step) for size, step in sizes)):
        box = tuple(slice(at, at + step) for at, step in zip(corner, shard.chunk, strict=True))
        origin = tuple(a + b for a, b in zip(shard.origin, corner, strict=True))
        yield origin, np.asarray(shard.values[box])


def has_fingerprints(shard: ShardToWrite, expected: Fingerprints) -> bool:
    """True if the chunks of a shard have these; looks no further than the first other."""
    return math.prod(_counts(shard)) == len(expected) and all(
        fingerprint(bytes_of(np.ascontiguousarray(part))) == one
        for (_, part), one in zip(_placed_chunks(shard), expected, strict=True)
    )


def _digest(
    part: np.ndarray[Any, Any], origin: tuple[int, ...], packed: tuple[str, int] | None
) -> int:
    if packed is None:
        return box_digest(part, origin)
    dtype, axis = packed
    return box_digest(unpack(part, dtype, axis), unpacked_shape(origin, axis))


def _digested(shard: ShardToWrite, digests: list[int]) -> DigestedBox:
    counts = _counts(shard)
    origin = shard.origin if shard.packed is None else unpacked_shape(shard.origin, shard.packed[1])
    return DigestedBox(origin, counts, np.array(digests, np.uint64).reshape(counts))


def _counts(shard: ShardToWrite) -> tuple[int, ...]:
    """Chunks per axis."""
    return tuple(size // step for size, step in zip(shard.values.shape, shard.chunk, strict=True))
