"""Writer of a step's index, and of the manifest that refers to it. See `step_index`."""

import hashlib
import math
import operator
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.counts import count_text
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.arrays.paged_table import TableLocation, table_location
from cairn.storage.errors import SaveError, UnsupportedFormatError
from cairn.storage.runs.records.layout import INDEX_FILE
from cairn.storage.runs.records.manifest import (
    CONTENT_FIELDS,
    LeafRecord,
    Manifest,
    ObjectRecord,
    refuse_crowded_step,
)
from cairn.storage.runs.records.step_index import (
    CONTENT,
    DIGEST_ROW,
    END,
    FILE_ROW,
    MAGIC,
    VALUE_ROW,
    IndexDirectory,
    StepIndex,
    digest_of_leaves,
    directory_bytes,
    index_ref,
    shard_grid,
    too_many_parts,
)
from cairn.storage.store.bounds import check_writable
from cairn.storage.store.records import RecordLocation

__all__ = ["PlacedShard", "copy_index", "make_index"]

_VALUE_FILE: Final = re.compile(r"(.+)/([0-9a-f]{32})")

Rows = np.ndarray[Any, np.dtype[Any]]


class PlacedShard(NamedTuple):
    """Shard of a leaf, with its place in the leaf and in a file.

    Attributes:
        origin: index in the leaf of the shard's first element.
        ref: location of the shard's value; the file's path is relative to the step's folder.
        digests: digests of its chunks, in C order.
    """

    origin: tuple[int, ...]
    ref: ValueRef
    digests: np.ndarray[Any, np.dtype[np.uint64]]


def make_index(
    manifest: Manifest,
    place: RecordLocation,
    *,
    leaves: Sequence[LeafRecord],
    forms: Mapping[str, Mapping[str, StoredForm]],
    meta_digest: str | None,
    shards: Mapping[tuple[str, str], Iterable[PlacedShard]],
    objects: Iterable[ObjectRecord],
    origins: Mapping[str, tuple[int, int]],
) -> tuple[bytes, Manifest]:
    """Return the content of a step's index, and the manifest that refers to it.

    Args:
        manifest: the manifest without an index.
        place: location of the index.
        leaves: every leaf of every item.
        forms: stored forms of leaves that are not stored as they are, by item and path.
        meta_digest: digest of the JSON item's canonical form; None if there is no JSON item.
        shards: the shards of every leaf that has any, by item and path.
        objects: every file of the step.
        origins: by file name, the (step, attempt) that wrote a file which the step shares.

    Raises:
        SaveError: shards of a leaf are missing or occur twice; all such leaves are listed.
    """
    objects = list(objects)
    refuse_crowded_step(len(leaves), len(objects), path=place.key)
    tables = _Tables(objects, origins)
    problems = []
    for leaf in leaves:
        problem = tables.add(leaf, shards.get((leaf.item, leaf.path), ()))
        if problem is not None:
            problems.append(f"{leaf.item}/{leaf.path}: {problem}")
    if problems:
        raise SaveError(
            "leaves were not written",
            path=place.key,
            expected="every shard of every leaf, once",
            found=count_text(
                len(problems),
                "leaf that lacks some, or has some twice",
                "leaves that lack some, or have some twice",
            ),
            next_step="Save again; the step is not listed.",
            problems=problems,
        )
    return _assembled(
        manifest,
        place,
        (tables.files(), tables.values(), tables.digests()),
        {
            "leaves": tuple(leaves),
            "forms": {item: dict(by_path) for item, by_path in forms.items()},
            "meta_digest": meta_digest,
            "objects": tuple(tables.others),
            "folders": tuple(tables.folders),
            "origins": tuple(tables.origins),
        },
    )


def copy_index(
    index: StepIndex, manifest: Manifest, place: RecordLocation
) -> tuple[bytes, Manifest]:
    """Return the content of the index of a step's copy, and the manifest that refers to it.

    A copy shares no files with other steps.

    Args:
        index: index of the step that was copied.
        manifest: manifest of the copy, without an index.
        place: location of the copy's index.

    Raises:
        CorruptionError: the index is not what was written.
        StoreUnavailableError: the store gives no answer.
    """
    files, values, digests = index.tables()
    files = files.copy()
    # The copy shares no files.
    files["origin"] = 0
    kept = ("leaves", "forms", "meta_digest", "objects", "folders", "chunk_alignment")
    fields = {name: getattr(index.directory, name) for name in kept}
    return _assembled(manifest, place, (files, values, digests), fields | {"origins": ()})


def _assembled(
    manifest: Manifest, place: RecordLocation, tables: Sequence[Rows], fields: Mapping[str, Any]
) -> tuple[bytes, Manifest]:
    """Return the content of an index with these tables, and the manifest that refers to it.

    Args:
        manifest: the manifest without an index.
        place: location of the index.
        tables: rows of files, of values and of digests.
        fields: fields of the directory that are neither tables nor copied from the manifest.
    """
    parts: list[bytes] = []
    places: list[TableLocation] = []
    offset = 0
    for rows in tables:
        places.append(table_location(rows, offset))
        parts.append(rows.tobytes())
        offset += len(parts[-1])
    directory = IndexDirectory(
        **manifest.model_dump(exclude=CONTENT_FIELDS),
        **fields,
        leaves_digest=digest_of_leaves(fields["leaves"]),
        files=places[0],
        values=places[1],
        digests=places[2],
    ).with_location(place)
    plain = directory.to_bytes()
    # The fastest level: the step can't be published before this is done.
    stored = zlib.compress(plain, 1)
    parts += (stored, END.pack(offset, len(stored), hashlib.sha256(stored).digest(), MAGIC))
    data = b"".join(parts)
    check_writable(INDEX_FILE, len(data))
    ref = index_ref(data, directory, offset)
    # The reader refuses a larger directory: fail now, not at the restore.
    most = directory_bytes(ref.leaves, ref.files, ref.size)
    if len(plain) > most:
        raise UnsupportedFormatError(
            "too large a step to be read again",
            path=place.key,
            expected=f"at most {most} bytes for what its index says of {ref.leaves} leaves",
            found=f"{len(plain)} bytes",
            next_step="Save fewer leaves, or such with shorter names, or a smaller config.",
        )
    return data, manifest.model_copy(update={"index": ref})


class _Tables:
    """Rows of an index's tables, in the order in which they were added."""

    def __init__(
        self, objects: Iterable[ObjectRecord], origins: Mapping[str, tuple[int, int]]
    ) -> None:
        self.others: list[ObjectRecord] = []
        self.folders: dict[str, int] = {}
        self.origins: dict[tuple[int, int], int] = {}
        self._numbers: dict[str, int] = {}
        self._files: list[tuple[int, int, bytes, int, int, int]] = []
        self._values: list[Rows] = []
        self._digests: list[np.ndarray[Any, np.dtype[np.uint64]]] = []
        for record in sorted(objects, key=operator.attrgetter("name")):
            match = _VALUE_FILE.fullmatch(record.name)
            content = record.content
            if match is None or content is None:
                self.others.append(record)
                continue
            origin = origins.get(record.name)
            number = 0
            if origin is not None:
                number = self.origins.setdefault(origin, len(self.origins)) + 1
            self._numbers[record.name] = len(self._files)
            self._files.append(
                (
                    self.folders.setdefault(match[1], len(self.folders)),
                    number,
                    bytes.fromhex(match[2]),
                    record.size,
                    int(record.crc32c, 16),
                    int(content.removeprefix(CONTENT), 16),
                )
            )

    def add(self, leaf: LeafRecord, shards: Iterable[PlacedShard]) -> str | None:
        """Add the rows of a leaf; return the problem with its shards, or None."""
        grid, chunks = shard_grid(leaf)
        all_shards, per_shard, expected = list(shards), math.prod(chunks), math.prod(grid)
        order = (
            _in_order(all_shards, leaf.shards or (), grid) if all_shards else np.empty(0, np.intp)
        )
        if (problem := too_many_parts(grid, chunks)) is not None:
            return problem
        if len(all_shards) != expected:
            return f"{expected} shards expected, found {len(all_shards)}"
        if isinstance(order, PlacedShard):
            return f"a shard at {list(order.origin)} of {order.digests.size} chunks"
        if order is None:
            return (
                f"{expected} shards expected, found {len({shard.origin for shard in all_shards})}"
            )
        placed = [all_shards[number] for number in order.tolist()]
        for shard in placed:
            if shard.digests.size != per_shard:
                return f"a shard at {list(shard.origin)} of {shard.digests.size} chunks"
            if shard.ref.file not in self._numbers:
                return f"in {shard.ref.file}, which is not among the step's files"
            self._digests.append(shard.digests.reshape(-1))
        rows = [(self._numbers[file], offset, length) for _, (file, offset, length), _ in placed]
        self._values.append(np.array(rows, VALUE_ROW))
        return None

    def files(self) -> Rows:
        """Return the table of files."""
        rows = np.zeros(len(self._files), FILE_ROW)
        if self._files:
            folder, origin, name, size, crc32c, content = zip(*self._files, strict=True)
            rows["folder"], rows["origin"], rows["size"] = folder, origin, size
            rows["crc32c"] = crc32c
            rows["content"] = np.array(content, np.uint64)
            rows["name"] = np.frombuffer(b"".join(name), np.uint8).reshape(-1, 16)
        return rows

    def values(self) -> Rows:
        """Return the table of values."""
        return np.concatenate([np.empty(0, VALUE_ROW), *self._values])

    def digests(self) -> Rows:
        """Return the table of digests."""
        return np.concatenate([np.empty(0, DIGEST_ROW), *self._digests]).astype(DIGEST_ROW)


def _in_order(
    shards: Sequence[PlacedShard], shape: Sequence[int], grid: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.intp]] | PlacedShard | None:
    """Return the indices that sort shards in C order of their positions in the grid.

    Args:
        shards: at least one shard.
        shape: shape of each shard.
        grid: number of shards along each axis.

    Returns:
        Indices into `shards`; or a shard that is outside the grid; or None if two shards have the
        same position.
    """
    for shard in shards:
        if len(shard.origin) != len(shape):
            return shard
    if len(shards) == 1:
        cell = map(operator.floordiv, shards[0].origin, shape)
        return shards[0] if any(map(operator.ge, cell, grid)) else np.zeros(1, np.intp)
    # Several shards of a scalar have the same position.
    if not shape:
        return None
    cells = np.array([shard.origin for shard in shards], np.int64) // np.array(shape, np.int64)
    (beyond,) = np.nonzero((cells >= np.array(grid, np.int64)).any(axis=1))
    if len(beyond):
        return shards[int(beyond[0])]
    places = np.ravel_multi_index(tuple(cells.T), tuple(grid))
    order = np.argsort(places, kind="stable")
    return None if (np.diff(places[order]) == 0).any() else order
