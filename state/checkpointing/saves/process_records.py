"""Records of what each process wrote of a step, from which process 0 makes one index.

In a job of several processes, each process except process 0 writes a record into the step's folder.
Process 0 reads and removes the records before the step is committed.
"""

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from cairn.storage.arrays.data_files import Fingerprints, StoredFile
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.errors import SaveError
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.records import Record
from cairn.storage.store.uri import StoreURI

__all__ = [
    "ProcessRecord",
    "WrittenShard",
    "parse_records",
    "read_records",
    "record_file",
    "records_to_bytes",
    "remove_records",
]


class WrittenShard(NamedTuple):
    """Outer shard in a data file.

    Attributes:
        path: the leaf's path.
        ref: the shard's location; the file's name is relative to the tree's folder.
        origin: index in the leaf of the shard's first element.
        digests: digests of the shard's chunks.
        fingerprints: fingerprints of the shard's chunks, by which the next save sees that they did
            not change; None if none were computed, or another process wrote the shard.
    """

    path: str
    ref: ValueRef
    origin: tuple[int, ...]
    digests: np.ndarray[Any, np.dtype[np.uint64]]
    fingerprints: Fingerprints | None = None


class ProcessRecord(NamedTuple):
    """Files and shards of a tree that one process wrote.

    Attributes:
        files: all files; their names are relative to the tree's folder.
        shards: the shards, by their key in the tree's database.
    """

    files: Sequence[StoredFile]
    shards: Mapping[bytes, WrittenShard]


class _Columns(BaseModel):
    """JSON form of a `ProcessRecord`, compact for many shards.

    Each column but the first three is base64 of little-endian uint64 numbers.

    Attributes:
        files: all files.
        paths: paths of the leaves.
        keys: key of each shard.
        leaf, file: leaf and file of each shard, as indices into `paths` and `files`.
        offset, length: byte range of each shard in its file.
        rank, origin: number of axes of each shard, and its first index along each of them.
        chunks, digests: number of chunks of each shard, and the digests of all chunks in order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[StoredFile, ...]
    paths: tuple[str, ...]
    keys: tuple[str, ...]
    leaf: str
    file: str
    offset: str
    length: str
    rank: str
    origin: str
    chunks: str
    digests: str

    @classmethod
    def of(cls, record: ProcessRecord) -> "_Columns":
        files = {file.name: number for number, file in enumerate(record.files)}
        paths: dict[str, int] = {}
        shards = record.shards.values()
        return cls(
            files=tuple(record.files),
            leaf=_column(paths.setdefault(shard.path, len(paths)) for shard in shards),
            paths=tuple(paths),
            keys=tuple(key.decode() for key in record.shards),
            file=_column(files[shard.ref.file] for shard in shards),
            offset=_column(shard.ref.offset for shard in shards),
            length=_column(shard.ref.length for shard in shards),
            rank=_column(len(shard.origin) for shard in shards),
            origin=_column(number for shard in shards for number in shard.origin),
            chunks=_column(shard.digests.size for shard in shards),
            digests=_column(
                np.concatenate([_NONE, *(shard.digests.reshape(-1) for shard in shards)])
            ),
        )

    def record(self) -> ProcessRecord:
        names = [file.name for file in self.files]
        columns = (self.leaf, self.file, self.offset, self.length, self.rank, self.chunks)
        rows = zip(self.keys, *(_numbers(column).tolist() for column in columns), strict=True)
        origins, digests = _numbers(self.origin).tolist(), _numbers(self.digests)
        axis = chunk = 0
        shards: dict[bytes, WrittenShard] = {}
        for key, leaf, file, offset, length, rank, chunks in rows:
            ref = ValueRef(names[file], offset, length)
            origin = tuple(origins[axis : axis + rank])
            shards[key.encode()] = WrittenShard(
                self.paths[leaf], ref, origin, digests[chunk : chunk + chunks]
            )
            axis, chunk = axis + rank, chunk + chunks
        return ProcessRecord(self.files, shards)


_NONE: Final = np.empty(0, np.uint64)


def _column(numbers: Iterable[int] | np.ndarray[Any, Any]) -> str:
    values = numbers if isinstance(numbers, np.ndarray) else np.array([*numbers], np.uint64)
    return base64.b64encode(values.astype("<u8").tobytes()).decode()


def _numbers(column: str) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.frombuffer(base64.b64decode(column), "<u8").astype(np.uint64, copy=False)


class _StepRecord(Record):
    FORMAT: ClassVar[str] = "cairn.step_part"

    items: dict[str, _Columns]


def records_to_bytes(records: Mapping[str, ProcessRecord]) -> bytes:
    """Return the content of this process's record file.

    Args:
        records: what this process wrote, by item.
    """
    items = {name: _Columns.of(record) for name, record in records.items()}
    return _StepRecord(items=items).to_bytes()


def parse_records(data: bytes, path: object) -> dict[str, ProcessRecord]:
    """Return the records, by item, from the result of `records_to_bytes`.

    Raises:
        UnsupportedFormatError, CorruptionError: `data` is no such record.
    """
    record = _StepRecord.parse(data, path)
    return {name: columns.record() for name, columns in record.items.items()}


def record_file(process: int) -> str:
    """Return the name of a process's record in the step's folder."""
    return f"cairn.process_{process}.json"


def read_records(folder: StoreURI, processes: Sequence[int]) -> list[dict[str, ProcessRecord]]:
    """Return what these processes wrote of a step: for each process, its records by item.

    Args:
        folder: the step's folder.
        processes: the processes, which must have written their records.

    Raises:
        SaveError: a process has written no record.
        UnsupportedFormatError, CorruptionError: a record can't be read.
        StoreUnavailableError: the store does not respond.
    """
    names = [record_file(process) for process in processes]
    objects = ObjectStore(folder, patient=True).read_many(names)
    missing = [name for name in names if objects[name] is None]
    if missing:
        raise SaveError(
            "a process did not tell what it wrote",
            path=folder,
            expected=", ".join(names),
            found=f"no {', '.join(missing)}",
            next_step="Have all processes write below the same folder and save again; the step "
            "is not listed.",
        )
    return [
        parse_records(stored.value, folder / name) for name, stored in objects.items() if stored
    ]


def remove_records(folder: StoreURI, processes: Sequence[int]) -> None:
    """Remove the records of these processes.

    Raises:
        StoreUnavailableError: the store does not respond.
    """
    ObjectStore(folder, patient=True).delete_many(map(record_file, processes))
