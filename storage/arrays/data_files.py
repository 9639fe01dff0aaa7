"""Writer of arrays as the data files of an OCDBT database, in one pass from memory to store.

Each outer shard of an array becomes one value: its inner chunks in order, each followed by a
crc32c, and an index (zarr's `sharding_indexed`, index at the end). Elements are stored as they are
in memory, unless compression is on. The same pass computes a digest of every chunk and a crc32c of
every file. See ADR 0009.

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
from cairn.storage.arrays.data_file_writers import DataFileWriter, FileContents
from cairn.storage.arrays.digests import box_digest
from cairn.storage.arrays.fingerprints import fingerprint
from cairn.storage.arrays.four_bits import unpack, unpacked_shape
from cairn.storage.arrays.ocdbt import DATA_FOLDER, ValueRef
from cairn.storage.store.checksums import CRC_AND_DATA_CRC32C, ContentSum, combine_crc32c

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
    "write_data_files",
]

Compression = Literal["zstd"]
"""Name of the compression of an array's chunks."""

CRC_BYTES: Final = 4
"""Size in bytes of the checksum after each chunk."""

_INDEX_ENTRY_BYTES: Final = 16

_ZSTD_LEVEL: Final = 1
"""Compression level; higher levels take much longer for floats and save little more."""


Fingerprints = tuple[int, ...]
"""Fingerprints of a shard's chunks, in stored order."""


class ShardToWrite(NamedTuple):
    """Outer shard of an array.

    Attributes:
        key: key of the shard in the database.
        path: the leaf's path.
        values: the elements in their stored dtype.
        origin: index of the first element in the stored array.
        chunk: shape of an inner chunk; divides the shape of `values`.
        packed: (dtype, axis) of a leaf with two elements per stored byte, else None.
        compression: compression of each chunk; None: none.
        fingerprinted: whether fingerprints of the chunks are computed while they are written.
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
        """Length in bytes of the shard's value without compression."""
        return stored_bytes(self.values.shape, self.chunk, self.values.itemsize)


def stored_bytes(shard: Sequence[int], chunk: Sequence[int], itemsize: int) -> int:
    """Return the length in bytes of a shard's value without compression: data, checksums, index."""
    chunks = math.prod(size // step for size, step in zip(shard, chunk, strict=True))
    data = math.prod(shard) * itemsize
    return data + chunks * (CRC_BYTES + _INDEX_ENTRY_BYTES) + CRC_BYTES


def codecs(compression: Compression | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return zarr's codecs of the inner chunks, and of the index after them."""
    octets = {"name": "bytes", "configuration": {"endian": "little"}}
    crc = {"name": "crc32c"}
    if compression is None:
        return [octets, crc], [octets, crc]
    packing = {"name": "zstd", "configuration": {"level": _ZSTD_LEVEL, "checksum": False}}
    return [octets, packing, crc], [octets, crc]


def bytes_of(values: np.ndarray[Any, Any]) -> memoryview:
    """Return the memory of a C-contiguous array."""
    return values.reshape(-1).view(np.uint8).data


def crc_bytes(data: bytes | memoryview) -> bytes:
    """Return the crc32c of some bytes, in its stored form."""
    # google_crc32c takes bytes and arrays only.
    checksum: int = google_crc32c.value(
        data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)
    )
    return checksum.to_bytes(CRC_BYTES, "little")


@functools.lru_cache(maxsize=1024)
def shard_index(shard: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> bytes:
    """Return the last bytes of a shard's value: (offset, length) per chunk, and their crc32c."""
    chunks = math.prod(size // step for size, step in zip(shard, chunk, strict=True))
    return _index_of([math.prod(chunk) * itemsize + CRC_BYTES] * chunks)


def _index_of(lengths: Sequence[int]) -> bytes:
    """Return the index of consecutive chunks with these lengths."""
    pairs = np.empty((len(lengths), 2), "<u8")
    pairs[:, 1] = lengths
    pairs[:, 0] = np.cumsum(pairs[:, 1]) - pairs[:, 1]
    table = pairs.tobytes()
    return table + crc_bytes(table)


class StoredFile(NamedTuple):
    """File as it was written.

    Attributes:
        name: path relative to the step's folder, or to the database's folder.
        size: size in bytes.
        crc32c: eight hexadecimal digits.
        content: content sum, as `ContentSum.text` returns it.
    """

    name: str
    size: int
    crc32c: str
    content: str


def stored_file(name: str, data: bytes) -> StoredFile:
    """Return the record of a file with these bytes."""
    content = ContentSum()
    content.update(data)
    return StoredFile(name, len(data), f"{google_crc32c.value(data):08x}", content.text())


class WrittenFile(NamedTuple):
    """Durable data file.

    Attributes:
        record: the file's name below the database's folder, its size and checksums.
        refs: location of each value, by the shard's key.
        boxes: the leaf's path and the chunks' digests, by the shard's key.
        fingerprints: the chunks' fingerprints, by the key of each shard marked `fingerprinted`.
        etag: the file's etag in the store; None if it has none.
    """

    record: StoredFile
    refs: dict[bytes, ValueRef]
    boxes: dict[bytes, tuple[str, DigestedBox]]
    fingerprints: dict[bytes, Fingerprints]
    etag: str | None = None


def write_data_files(
    sink: DataFileWriter, shards: Iterable[ShardToWrite], *, stopped: Callable[[], bool] = bool
) -> list[WrittenFile]:
    """Write all shards, several files at a time; return the files once all are durable.

    A shard is released as soon as it is written.

    Args:
        sink: destination of the files.
        shards: the shards, in the order in which they are likely to be read.
        stopped: called between files; if it returns True, no more files are written.

    Raises:
        OSError: the disk is full, or failed.
        StoreUnavailableError: the store gives no answer.
    """
    jobs: queue.SimpleQueue[list[ShardToWrite]] = queue.SimpleQueue()
    for batch in _batches(shards, sink.file_bytes):
        jobs.put(batch)
    written: list[tuple[WrittenFile, Future[str | None]]] = []
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
    wait([future for _, future in written])
    for worker in workers:
        worker.result()
    return [file._replace(etag=future.result()) for file, future in written]


def _batches(shards: Iterable[ShardToWrite], limit: int) -> Iterator[list[ShardToWrite]]:
    """Yield groups of consecutive shards; each group becomes a file of at most `limit` bytes."""
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


def _write_file(
    sink: DataFileWriter, batch: list[ShardToWrite]
) -> tuple[WrittenFile, "Future[str | None]"]:
    name = f"{DATA_FOLDER}/{secrets.token_hex(16)}"
    refs: dict[bytes, ValueRef] = {}
    boxes: dict[bytes, tuple[str, DigestedBox]] = {}
    fingerprints: dict[bytes, Fingerprints] = {}
    content = ContentSum()
    file = _FileSums()

    def pieces() -> FileContents:
        for shard in batch:
            start = file.size
            digests: list[int] = []
            prints: list[int] = []
            yield from _encoded(shard, file, digests, prints)
            refs[shard.key] = ValueRef(name, start, file.size - start)
            counts, origin = _counts(shard), shard.origin
            if shard.packed is not None:
                origin = unpacked_shape(origin, shard.packed[1])
            grid = np.array(digests, np.uint64).reshape(counts)
            boxes[shard.key] = (shard.path, DigestedBox(origin, counts, grid))
            if shard.fingerprinted:
                fingerprints[shard.key] = tuple(prints)

    expected = sum(shard.stored_bytes for shard in batch)
    durable = sink.write(name, pieces(), content, expected)
    record = StoredFile(name, file.size, f"{file.crc:08x}", content.text())
    return WrittenFile(record, refs, boxes, fingerprints), durable


class _FileSums:
    """Size and crc32c of a file so far; the file's parts each end in their own crc32c.

    Attributes:
        size: number of bytes.
        crc: crc32c of the bytes.
    """

    size = crc = 0

    def add(self, length: int) -> None:
        """Count a part of `length` bytes, its crc32c included."""
        self.crc = combine_crc32c(self.crc, CRC_AND_DATA_CRC32C, length)
        self.size += length


def _encoded(
    shard: ShardToWrite, file: _FileSums, digests: list[int], prints: list[int]
) -> FileContents:
    """Generate a shard's value: each chunk and its crc32c, then the index and its crc32c.

    Appends the chunks' digests, and their fingerprints if requested. All are computed from the
    bytes that are written, even if the array changes meanwhile.
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
    """Copy a chunk into memory; append its digest, and its fingerprint if requested."""
    octets = np.frombuffer(data, np.uint8)
    chunk = octets.view(part.dtype).reshape(part.shape)
    if part.flags.c_contiguous:
        octets[:] = part.reshape(-1).view(np.uint8)
    else:
        chunk[...] = part
    if shard.packed is None:
        digests.append(box_digest(chunk, origin))
    else:
        dtype, axis = shard.packed
        digests.append(box_digest(unpack(chunk, dtype, axis), unpacked_shape(origin, axis)))
    if shard.fingerprinted:
        prints.append(fingerprint(data))


def _placed_chunks(
    shard: ShardToWrite,
) -> Iterator[tuple[tuple[int, ...], np.ndarray[Any, np.dtype[Any]]]]:
    """Yield every chunk in C order, with the index of its first element in the stored array."""
    sizes = zip(shard.values.shape, shard.chunk, strict=True)
    for corner in itertools.product(*(range(0, size, step) for size, step in sizes)):
        box = tuple(slice(at, at + step) for at, step in zip(corner, shard.chunk, strict=True))
        origin = tuple(a + b for a, b in zip(shard.origin, corner, strict=True))
        yield origin, np.asarray(shard.values[box])


def has_fingerprints(shard: ShardToWrite, expected: Fingerprints) -> bool:
    """Return True if a shard's chunks have these fingerprints; stop at the first mismatch."""
    return math.prod(_counts(shard)) == len(expected) and all(
        fingerprint(bytes_of(np.ascontiguousarray(part))) == recorded
        for (_, part), recorded in zip(_placed_chunks(shard), expected, strict=True)
    )


def _counts(shard: ShardToWrite) -> tuple[int, ...]:
    """Return the number of chunks per axis."""
    return tuple(size // step for size, step in zip(shard.values.shape, shard.chunk, strict=True))
