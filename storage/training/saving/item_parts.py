"""What one process wrote of an item, as it tells process 0, which makes one index of all.

With one process nothing is told. With several each leaves a record beside what it wrote, which
process 0 reads, and removes, before the step is committed. Imports no JAX.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, Final, NamedTuple

import numpy as np

from cairn.storage.arrays import StoredFile, ValueRef
from cairn.storage.errors import SaveError
from cairn.storage.runs import PlacedShard
from cairn.storage.store import ObjectStore, Record, StoreURI

__all__ = ["ItemPart", "WrittenShard", "part_file", "take_parts"]

_FILES_AT_ONCE: Final = 16


class WrittenShard(NamedTuple):
    """An outer shard that lies in a value file.

    Attributes:
        path: the leaf's path.
        placed: where; the file is named from the item's folder.
    """

    path: str
    placed: PlacedShard


class ItemPart(NamedTuple):
    """What one process wrote of an item.

    Attributes:
        files: all of its files, named from the item's folder.
        shards: by their key in the item's database.
    """

    files: Sequence[StoredFile]
    shards: Mapping[bytes, WrittenShard]

    def to_bytes(self) -> bytes:
        """The record that tells process 0."""
        numbers = {file.name: number for number, file in enumerate(self.files)}
        rows = tuple(
            _Row(
                key.decode(),
                path,
                placed.origin,
                numbers[placed.ref.file],
                placed.ref.offset,
                placed.ref.length,
                np.ascontiguousarray(placed.digests, "<u8").tobytes().hex(),
            )
            for key, (path, placed) in self.shards.items()
        )
        return _PartRecord(files=tuple(self.files), shards=rows).to_bytes()

    @classmethod
    def parse(cls, data: bytes, path: object) -> "ItemPart":
        """What `to_bytes` made.

        Raises:
            UnsupportedFormatError, CorruptionError: it is not that.
        """
        record = _PartRecord.parse(data, path)
        shards = {}
        for row in record.shards:
            digests = np.frombuffer(bytes.fromhex(row.digests), "<u8").astype(np.uint64)
            ref = ValueRef(record.files[row.file].name, row.offset, row.length)
            shards[row.key.encode()] = WrittenShard(row.path, PlacedShard(row.origin, ref, digests))
        return cls(record.files, shards)


class _Row(NamedTuple):
    """A shard: its digests in hexadecimal digits, its file by number."""

    key: str
    path: str
    origin: tuple[int, ...]
    file: int
    offset: int
    length: int
    digests: str


class _PartRecord(Record):
    FORMAT: ClassVar[str] = "cairn.item_part"

    files: tuple[StoredFile, ...]
    shards: tuple[_Row, ...]


def part_file(process: int) -> str:
    """The name of the record of a process, in the item's folder."""
    return f"cairn.process_{process}.json"


def take_parts(folder: StoreURI, processes: Sequence[int]) -> list[ItemPart]:
    """What these processes wrote of an item; their records are removed.

    Args:
        folder: the item's.
        processes: those that have written their records.

    Raises:
        SaveError: one has left no record.
        UnsupportedFormatError, CorruptionError: a record is not what was written.
        StoreUnavailableError: the store gives no answer.
    """
    objects = ObjectStore(folder, patient=True)
    names = [part_file(process) for process in processes]
    found = objects.read_many(names)
    missing = [name for name in names if found[name] is None]
    if missing:
        raise SaveError(
            "a process did not tell what it wrote",
            path=folder,
            expected=", ".join(names),
            found=f"no {', '.join(missing)}",
            next_step="Have all processes write below the same folder and save again; the step "
            "is not listed.",
        )
    parts = [ItemPart.parse(one.value, folder / name) for name, one in found.items() if one]
    with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(names))) as pool:
        for done in [pool.submit(objects.delete, name) for name in names]:
            done.result()
    return parts
