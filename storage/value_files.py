"""Write arrays as the value files of an OCDBT database: from memory to the store in one pass.

Each outer shard of an array becomes one value: its inner chunks one after another, a crc32c behind
each, and an index (zarr's `sharding_indexed`, index at the end). What is written are the arrays'
own bytes, without a copy where a chunk lies in one piece. In the same pass every chunk gets its
digest and every file its crc32c. Imports no JAX. See ADR 0009.

Source: zarr v3 specification, codecs `sharding_indexed` 1.0, `bytes` 1.0 and `crc32c` 1.0.
"""

import functools
import itertools
import math
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Final, NamedTuple, Protocol

import google_crc32c
import numpy as np

from storage.chunk_digests import DigestedBox
from storage.content_sum import ContentSum
from storage.crc32c import CHECKED_PART, combined
from storage.digests import box_digest
from storage.four_bits import unpack, unpacked_shape
from storage.manifest import ObjectRecord
from storage.objects import ObjectStore
from storage.ocdbt import VALUE_FOLDER, ValueRef
from storage.uri import StoreURI

__all__ = [
    "CRC_BYTES",
    "FILE_BYTES",
    "REMOTE_FILE_BYTES",
    "ShardToWrite",
    "ValueSink",
    "WrittenFile",
    "bytes_of",
    "crc_bytes",
    "has_digests",
    "open_sink",
    "shard_index",
    "stored_bytes",
    "write_value_files",
]

FILE_BYTES: Final = 64 << 20
"""A value file on a disk is closed once it would grow beyond this."""

REMOTE_FILE_BYTES: Final = 32 << 20
"""The same for objects. Of those, `_REMOTE_WRITERS` are in memory at a time, twice each."""

_REMOTE_WRITERS: Final = 8
CRC_BYTES: Final = 4
"""Behind each chunk."""

_INDEX_ENTRY_BYTES: Final = 16
_BATCH_BYTES: Final = 1 << 20
_BATCH_BUFFERS: Final = 512

Buffer = bytes | memoryview


class ShardToWrite(NamedTuple):
    """One outer shard of an array.

    Attributes:
        key: its key in the database.
        path: the leaf's path.
        values: the elements, as they are stored.
        origin: index of the first one in the stored array.
        chunk: shape of an inner chunk; divides that of `values`.
        packed: (dtype, axis) of a leaf that is stored two elements in a byte, else None.
    """

    key: bytes
    path: str
    values: np.ndarray[Any, Any]
    origin: tuple[int, ...]
    chunk: tuple[int, ...]
    packed: tuple[str, int] | None = None

    @property
    def stored_bytes(self) -> int:
        """Length of the value."""
        return stored_bytes(self.values.shape, self.chunk, self.values.itemsize)


def stored_bytes(shard: Sequence[int], chunk: Sequence[int], itemsize: int) -> int:
    """Length of a shard's value: data, checksums and index."""
    chunks = math.prod(size // step for size, step in zip(shard, chunk, strict=True))
    data = math.prod(shard) * itemsize
    return data + chunks * (CRC_BYTES + _INDEX_ENTRY_BYTES) + CRC_BYTES


def bytes_of(values: np.ndarray[Any, Any]) -> memoryview:
    """The memory of an array that lies in one piece, in C order."""
    return values.reshape(-1).view(np.uint8).data


def crc_bytes(data: Buffer) -> bytes:
    """The crc32c of some bytes, as it is stored."""
    checksum: int = google_crc32c.value(_array(data))
    return checksum.to_bytes(CRC_BYTES, "little")


def _array(data: Buffer) -> Any:
    """What google_crc32c takes: bytes, or an array."""
    return data if isinstance(data, bytes) else np.frombuffer(data, np.uint8)


@functools.lru_cache(maxsize=1024)
def shard_index(shard: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> bytes:
    """The last bytes of a shard's value: (offset, length) of each chunk, and their crc32c."""
    chunks = math.prod(size // step for size, step in zip(shard, chunk, strict=True))
    length = math.prod(chunk) * itemsize + CRC_BYTES
    pairs = np.empty((chunks, 2), "<u8")
    pairs[:, 0] = np.arange(chunks, dtype=np.uint64) * np.uint64(length)
    pairs[:, 1] = length
    table = pairs.tobytes()
    return table + crc_bytes(table)


class WrittenFile(NamedTuple):
    """A value file that is durable.

    Attributes:
        record: its name below the database's folder, size and checksum.
        refs: by key, where the values lie.
        boxes: by key, the leaf's path and the digests of the chunks.
    """

    record: ObjectRecord
    refs: dict[bytes, ValueRef]
    boxes: dict[bytes, tuple[str, DigestedBox]]


class ValueSink(Protocol):
    """Where value files go.

    Attributes:
        file_bytes: most bytes of a file, unless one value has more.
        writers: how many files to write at a time.
    """

    file_bytes: int
    writers: int

    def write(self, name: str, buffers: Iterable[Buffer]) -> "Future[None]":
        """Write a new file; the future is done once it is durable.

        Raises:
            OSError: the disk is full, or failed.
            StoreUnavailableError: the store gives no answer.
        """

    def close(self) -> None:
        """Free threads."""


def open_sink(folder: StoreURI) -> ValueSink:
    """The sink for the database in `folder`."""
    return _LocalSink(folder.local_path) if folder.scheme == "file" else _RemoteSink(folder)


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
    content = ContentSum()
    crc = size = 0

    def buffers() -> Iterator[Buffer]:
        nonlocal crc, size
        for shard in batch:
            start = size
            digests: list[int] = []
            for part in _encoded(shard, digests):
                length = sum(map(len, part))
                crc = combined(crc, CHECKED_PART, length)
                size += length
                for buffer in part:
                    content.update(buffer)
                    yield buffer
            refs[shard.key] = ValueRef(name, start, size - start)
            boxes[shard.key] = (shard.path, _digested(shard, digests))

    durable = sink.write(name, buffers())
    record = ObjectRecord(name=name, size=size, crc32c=f"{crc:08x}", content=content.text())
    return WrittenFile(record, refs, boxes), durable


def _encoded(shard: ShardToWrite, digests: list[int]) -> Iterator[tuple[Buffer, Buffer]]:
    """The value: each chunk and its crc32c, then the index and its. Appends the chunks' digests."""
    for corner, part in _chunks(shard.values, shard.chunk):
        origin = tuple(a + b for a, b in zip(shard.origin, corner, strict=True))
        digests.append(_digest(part, origin, shard.packed))
        data = bytes_of(np.ascontiguousarray(part))
        yield data, crc_bytes(data)
    index = shard_index(shard.values.shape, shard.chunk, shard.values.itemsize)
    yield index[:-CRC_BYTES], index[-CRC_BYTES:]


def _chunks(
    values: np.ndarray[Any, Any], chunk: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], np.ndarray[Any, Any]]]:
    """Every chunk in C order, with the index of its first element in the shard."""
    starts = (range(0, size, step) for size, step in zip(values.shape, chunk, strict=True))
    for corner in itertools.product(*starts):
        box = tuple(slice(at, at + step) for at, step in zip(corner, chunk, strict=True))
        yield corner, values[box]


def has_digests(shard: ShardToWrite, box: DigestedBox) -> bool:
    """True if the chunks of a shard have these digests; looks no further than the first other."""
    if _counts(shard) != box.counts:
        return False
    expected = map(int, box.digests.flat)
    for (corner, part), digest in zip(_chunks(shard.values, shard.chunk), expected, strict=True):
        origin = tuple(a + b for a, b in zip(shard.origin, corner, strict=True))
        if _digest(part, origin, shard.packed) != digest:
            return False
    return True


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


class _LocalSink:
    """Files of a local disk. Each is synced by another thread while the next is written."""

    def __init__(self, folder: str) -> None:
        self.file_bytes = FILE_BYTES
        self.writers = max(2, min(8, os.cpu_count() or 2))
        self._folder = folder
        os.makedirs(os.path.join(folder, VALUE_FOLDER), exist_ok=True)
        self._syncing = ThreadPoolExecutor(self.writers, thread_name_prefix="cairn-sync")

    def write(self, name: str, buffers: Iterable[Buffer]) -> "Future[None]":
        path = os.path.join(self._folder, name)
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        try:
            batch: list[Buffer] = []
            size = 0
            for buffer in buffers:
                batch.append(buffer)
                size += len(buffer)
                if size >= _BATCH_BYTES or len(batch) >= _BATCH_BUFFERS:
                    _write_all(descriptor, batch)
                    batch, size = [], 0
            _write_all(descriptor, batch)
        except OSError as exc:
            os.close(descriptor)
            raise OSError(exc.errno, exc.strerror, path) from exc
        except BaseException:
            os.close(descriptor)
            raise
        return self._syncing.submit(_sync_and_close, descriptor, path)

    def close(self) -> None:
        self._syncing.shutdown()


class _RemoteSink:
    """Objects of a store. Each is put together in memory: a store is asked again if it fails."""

    def __init__(self, folder: StoreURI) -> None:
        self.file_bytes = REMOTE_FILE_BYTES
        self.writers = _REMOTE_WRITERS
        self._objects = ObjectStore(folder, patient=True)

    def write(self, name: str, buffers: Iterable[Buffer]) -> "Future[None]":
        self._objects.write(name, b"".join(buffers))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def close(self) -> None:
        return


def _write_all(descriptor: int, batch: list[Buffer]) -> None:
    """`writev`, again for what it did not take."""
    while batch:
        taken = os.writev(descriptor, batch)
        while batch and taken >= len(batch[0]):
            taken -= len(batch[0])
            batch.pop(0)
        if taken:
            batch[0] = batch[0][taken:]


def _sync_and_close(descriptor: int, path: str) -> None:
    try:
        os.fsync(descriptor)
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, path) from exc
    finally:
        os.close(descriptor)
