"""Index of a step: every leaf, every file, each value's location, and each chunk's digest.

A step has one index file. It is written before the manifest, which holds the SHA-256 of the index's
directory. The directory is a compressed record with the SHA-256 of each page of the three tables
before it. A reader reads the directory and the pages that its leaves need, and compares all bytes
with their SHA-256 before it uses them.

    files | values | digests | directory | its offset, length and SHA-256

- files: a row for each file of values: folder, name, size, checksums, and the step that wrote it.
- values: a row for each outer shard of each leaf: its file, offset and length. Leaves are in the
  directory's order, shards in C order.
- digests: of the chunks of these shards, each shard's in C order.

The directory repeats what the manifest says, so that the manifest can be rebuilt from the index.
See ADR 18.
"""

import hashlib
import itertools
import math
import operator
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Final, Literal, NamedTuple

import numpy as np
from pydantic import Field, ValidationError
from typing_extensions import override

from cairn.storage.arrays.digests import total
from cairn.storage.arrays.ocdbt import ValueRef
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.arrays.paged_table import PagedTable, TableLocation, damaged_index
from cairn.storage.errors import CorruptionError, NotFoundError
from cairn.storage.runs.records.layout import INDEX_FILE, step_dir
from cairn.storage.runs.records.manifest import (
    CONTENT_FIELDS,
    MAX_BYTES,
    MOST_FILES,
    AssetRecord,
    IndexRef,
    LeafRecord,
    Leaves,
    Manifest,
    ModelInfo,
    Number,
    ObjectRecord,
    Objects,
    Processes,
    Sha256,
    SharedFiles,
)
from cairn.storage.runs.records.placed import place_of
from cairn.storage.runs.records.step_contents import InlineContents, StepContents
from cairn.storage.store.bounds import FreeJson, Oversized, bound_of, check_not_oversized
from cairn.storage.store.clock import Moment
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.records import Record, RecordLocation
from cairn.storage.store.uri import StoreURI

__all__ = [
    "CONTENT",
    "DIGEST_ROW",
    "END",
    "FILE_ROW",
    "MAGIC",
    "VALUE_ROW",
    "IndexDirectory",
    "ItemPlaces",
    "StepIndex",
    "digest_of_leaves",
    "directory_bytes",
    "index_ref",
    "open_contents",
    "parse_index",
    "shard_grid",
    "too_many_parts",
    "whole_contents",
]

MOST_DIRECTORY_BYTES: Final = 64 << 20
"""Largest directory after decompression; enough for 100,000 leaves."""

_PLAIN_BYTES: Final = 4 << 20
_LEAF_BYTES: Final = 4 << 10
_FILE_BYTES: Final = 1 << 10
_TABLE_BYTES: Final = 512
"""Most bytes of tables per byte of directory, which has a SHA-256 for each page of a table."""

MOST_SHARDS: Final = 1 << 18
"""Most shards of a leaf: each takes some 400 bytes of memory where TensorStore reads it."""

MAX_SHARD_CHUNKS: Final = 1 << 14
"""Most chunks of a shard. A shard of 64 MiB has 4,096; see `arrays.chunks`."""

_WHOLE_BYTES: Final = 4 << 20
"""Size in bytes up to which an index is read in one request."""

_LOADED_BYTES: Final = 64 << 20
"""The same as `_WHOLE_BYTES`, if all leaves are requested: requests cost more than bytes."""

FILE_ROW: Final = np.dtype(
    [
        ("folder", "<u4"),
        ("origin", "<u4"),
        ("name", "u1", (16,)),
        ("size", "<u8"),
        ("crc32c", "<u4"),
        ("content", "<u8"),
    ]
)
VALUE_ROW: Final = np.dtype([("file", "<u4"), ("offset", "<u8"), ("length", "<u8")])
DIGEST_ROW: Final = np.dtype("<u8")
END: Final = struct.Struct("<QQ32s8s")
MAGIC: Final = b"cairnidx"

CONTENT: Final = "words-64:"

Rows = np.ndarray[Any, np.dtype[Any]]
Cell = tuple[int, ...]


class IndexDirectory(Record):
    """Content of an index besides its tables.

    Attributes:
        step, attempt, created, writer, items, iterators, assets, model, environment: as in the
            manifest.
        leaves: every leaf of every item.
        leaves_digest: digest of the leaves, as in the manifest.
        forms: stored forms of leaves that are not stored as they are, by item and path.
        meta_digest: digest of the JSON item's canonical form; None if there is no JSON item.
        objects: the files that hold no values.
        folders: the folders of the files that hold values.
        origins: (step, attempt) of the steps whose files this step shares.
        chunk_alignment: alignment of a value's chunks in bytes. With 1, they follow one another.
        files, values, digests: locations of the tables.
    """

    FORMAT: ClassVar[str] = "cairn.step_index"

    step: Number
    attempt: Number
    created: Moment
    writer: str
    items: tuple[str, ...]
    iterators: dict[str, Processes] = Field(
        default_factory=dict, exclude_if=lambda field: not field
    )
    assets: tuple[AssetRecord, ...]
    model: ModelInfo | None
    environment: FreeJson
    leaves: Leaves
    leaves_digest: Sha256 | None = Field(default=None, exclude_if=lambda field: field is None)
    forms: dict[str, dict[str, StoredForm]] = Field(default_factory=dict)
    meta_digest: str | None
    objects: Objects
    folders: tuple[str, ...]
    origins: tuple[tuple[Number, Number], ...]
    chunk_alignment: Literal[1] = 1
    files: TableLocation
    values: TableLocation
    digests: TableLocation


def shard_grid(leaf: LeafRecord) -> tuple[Cell, Cell]:
    """Return the number of a leaf's shards per axis, and of a shard's chunks per axis.

    Typed PRNG keys have trailing axes that their logical shape does not include.
    """
    if leaf.shards is None or leaf.chunks is None:
        return (0,), (0,)
    shape = (*leaf.shape, *leaf.shards[len(leaf.shape) :])
    shards = tuple(-(-n // step) for n, step in zip(shape, leaf.shards, strict=True))
    return shards, tuple(a // b for a, b in zip(leaf.shards, leaf.chunks, strict=True))


def directory_bytes(leaves: int, files: int, index_bytes: int) -> int:
    """Return the largest size that a step's directory may have after decompression.

    Args:
        leaves: number of leaves of the step.
        files: number of files of the step.
        index_bytes: size of the whole index.
    """
    needed = _PLAIN_BYTES + leaves * _LEAF_BYTES + files * _FILE_BYTES
    return min(MOST_DIRECTORY_BYTES, needed + index_bytes // _TABLE_BYTES)


def too_many_parts(grid: Cell, chunks: Cell) -> str | None:
    """Return why a leaf with these numbers of shards and chunks can't be read; None if it can."""
    shards, each = math.prod(grid), math.prod(chunks)
    if shards > MOST_SHARDS:
        return f"{shards} shards, expected at most {MOST_SHARDS}"
    if each > MAX_SHARD_CHUNKS:
        return f"{each} chunks in a shard, expected at most {MAX_SHARD_CHUNKS}"
    return None


def index_ref(data: bytes, directory: IndexDirectory, offset: int) -> IndexRef:
    """Return the manifest's reference to an index."""
    stored = data[offset : -END.size]
    names = PagedTable(
        directory.files, FILE_ROW, lambda a, b: data[a:b], end=offset, path=INDEX_FILE
    )
    sizes = names.rows(0, len(names))["size"].tolist()
    sizes += [record.size for record in directory.objects]
    return IndexRef(
        size=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        directory=(offset, len(stored)),
        directory_sha256=hashlib.sha256(stored).hexdigest(),
        nbytes=sum(sizes),
        files=len(sizes),
        leaves=len(directory.leaves),
        leaves_digest=directory.leaves_digest,
    )


def digest_of_leaves(leaves: Iterable[LeafRecord]) -> str | None:
    """Return a SHA-256 over the shape, dtype and digest of each leaf; None if one has no digest.

    It does not depend on how the leaves are stored.
    """
    lines = []
    for leaf in leaves:
        if leaf.digest is None:
            return None
        lines.append(repr((leaf.item, leaf.path, leaf.shape, leaf.dtype, leaf.digest)))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def parse_index(
    data: bytes, path: object, place: RecordLocation | None = None
) -> tuple[Manifest, "StepIndex"]:
    """Return the manifest that a whole index describes, and the index; every byte is checked.

    Args:
        data: content of the file.
        path: the file, for errors.
        place: expected place of the index; an index of another place is refused.

    Raises:
        CorruptionError: the file is not what was written, or is of another place.
        UnsupportedFormatError: the file is not an index, or of a newer release.
    """
    if len(data) < END.size or data[-len(MAGIC) :] != MAGIC:
        raise damaged_index(path, "an index", f"{len(data)} bytes without its end")
    offset, length, digest, _ = END.unpack_from(data, len(data) - END.size)
    if offset + length + END.size != len(data):
        raise damaged_index(path, f"{offset + length + END.size} bytes", f"{len(data)} bytes")
    stored = data[offset : offset + length]
    actual = hashlib.sha256(stored).digest()
    if actual != digest:
        raise damaged_index(path, f"a directory with SHA-256 {digest.hex()}", actual.hex())
    directory = _directory(stored, path, place, MOST_DIRECTORY_BYTES)
    whole = memoryview(data)
    index = StepIndex(directory, lambda start, stop: whole[start:stop], offset, path)
    index.check()
    entries = {name: getattr(directory, name) for name in {*Manifest.model_fields} - CONTENT_FIELDS}
    manifest = Manifest(**entries, index=index_ref(data, directory, offset))
    return manifest, index


def open_contents(step: StoreURI, manifest: Manifest, *, whole: bool = False) -> StepContents:
    """Return the leaves and files of the step in the folder `step`.

    Args:
        step: the step's folder.
        manifest: the step's manifest.
        whole: whether most leaves will be read; a large index is then read in one request too.

    Raises:
        CorruptionError: the index is missing, or is not what was written.
        UnsupportedFormatError: the index is of a newer release.
        StoreUnavailableError: the store gives no answer.
    """
    ref = manifest.index
    if ref is None:
        return InlineContents(manifest)
    files, path = open_files(step), step / INDEX_FILE
    bound = bound_of(INDEX_FILE)
    if ref.size > bound.max_bytes:
        raise Oversized(ref.size, bound).error(path)

    def fetch(start: int, stop: int) -> memoryview:
        try:
            return memoryview(files.read_range(INDEX_FILE, start, stop))
        except NotFoundError as exc:
            raise damaged_index(path, f"the step's index of {ref.size} bytes", "none") from exc

    offset, length = ref.directory
    most = directory_bytes(ref.leaves, ref.files, ref.size)
    if offset + length + END.size != ref.size or length > most:
        expected = f"a directory of at most {most} bytes that ends {END.size} before {ref.size}"
        raise damaged_index(path, expected, f"{length} bytes at {offset}")
    read = fetch
    if ref.size <= (_LOADED_BYTES if whole else _WHOLE_BYTES):
        # One byte more than recorded: an index that has grown is then refused by its SHA-256.
        data = fetch(0, ref.size + 1)
        _check_whole(data, ref, path)

        def read(start: int, stop: int) -> memoryview:
            return data[start:stop]

    stored = read(offset, offset + length)
    actual = hashlib.sha256(stored).hexdigest()
    if actual != ref.directory_sha256:
        raise damaged_index(path, f"a directory with SHA-256 {ref.directory_sha256}", actual)
    directory = _directory(stored, path, None, most)
    if (directory.step, directory.attempt) != (manifest.step, manifest.attempt):
        raise damaged_index(
            path,
            f"that of step {manifest.step} in attempt {manifest.attempt}",
            f"that of step {directory.step} in attempt {directory.attempt}",
        )
    index = StepIndex(directory, read, offset, path)
    if (ref.leaves, ref.files) != (len(directory.leaves), index.file_count):
        raise damaged_index(
            path,
            f"{ref.leaves} leaves and {ref.files} files, as in the manifest",
            f"{len(directory.leaves)} and {index.file_count}",
        )
    return index


def whole_contents(objects: ObjectStore, manifest: Manifest) -> StepContents:
    """Return a step's contents as `open_contents` does, but check every byte of the index now.

    Args:
        objects: the run's objects.
        manifest: manifest of one of the run's steps.
    """
    ref, folder = manifest.index, step_dir(manifest.attempt, manifest.step)
    if ref is None:
        return InlineContents(manifest)
    name = f"{folder}/{INDEX_FILE}"
    path, stored = objects.uri / name, objects.read(name)
    if stored is None:
        raise damaged_index(path, f"the step's index of {ref.size} bytes", "none")
    check_not_oversized(stored.value, path)
    _check_whole(stored.value, ref, path)
    return parse_index(stored.value, path, place_of(objects, name))[1]


def _check_whole(data: bytes | memoryview, ref: IndexRef, path: object) -> None:
    """Raise CorruptionError if an index is not the one to which its manifest refers."""
    actual = hashlib.sha256(data).hexdigest()
    if actual != ref.sha256:
        raise damaged_index(
            path,
            f"{ref.size} bytes with SHA-256 {ref.sha256}",
            f"{len(data)} with {actual}",
        )


def _directory(
    stored: bytes | memoryview, path: object, place: RecordLocation | None, most: int
) -> IndexDirectory:
    inflater = zlib.decompressobj()
    try:
        # Decompress at most one byte more than allowed: a damaged or hostile directory must not
        # fill memory.
        data = inflater.decompress(stored, most + 1)
    except zlib.error as exc:
        raise damaged_index(path, "a compressed directory", str(exc)) from exc
    if len(data) > most:
        expected = f"a directory of at most {most} bytes, for its leaves and files"
        raise damaged_index(path, expected, f"{len(stored)} bytes that make more")
    if not inflater.eof or inflater.unused_data:
        raise damaged_index(path, "a compressed directory", "one that ends elsewhere")
    return IndexDirectory.parse(data, path, place)


class StepIndex(StepContents):
    """Open index of a step. Safe for use by many threads.

    Attributes:
        directory: content of the index besides the tables.
    """

    def __init__(
        self,
        directory: IndexDirectory,
        fetch: Callable[[int, int], bytes | memoryview],
        end: int,
        path: object,
    ) -> None:
        """Open the tables of an index whose directory was read.

        Args:
            directory: the directory.
            fetch: returns the file's bytes between two offsets.
            end: offset at which the tables end and the directory begins.
            path: the file, for errors.

        Raises:
            CorruptionError: the tables do not fit the leaves.
        """
        self.directory = directory
        self._path = path
        self._files, self._values, self._digests = (
            PagedTable(place, row, fetch, end=end, path=path)
            for place, row in (
                (directory.files, FILE_ROW),
                (directory.values, VALUE_ROW),
                (directory.digests, DIGEST_ROW),
            )
        )
        if self.file_count > MOST_FILES:
            raise damaged_index(path, f"at most {MOST_FILES} files", str(self.file_count))
        self._names: dict[int, str] = {}
        self._items: dict[str, dict[str, _LeafRows]] = {}
        # Rows are in the directory's order of leaves: only each leaf's first row has to be kept.
        value = digest = 0
        for leaf in directory.leaves:
            try:
                grid, chunks = shard_grid(leaf)
            except (ValueError, ZeroDivisionError) as exc:
                expected = f"shards and chunks that divide {leaf.item}/{leaf.path}"
                found = f"{leaf.shards} and {leaf.chunks} of {leaf.shape}"[:200]
                raise damaged_index(path, expected, found) from exc
            if (problem := too_many_parts(grid, chunks)) is not None:
                raise damaged_index(path, f"parts of {leaf.item}/{leaf.path}"[:200], problem)
            rows = _LeafRows(value, digest, grid, chunks)
            value, digest = rows.end
            if value > rows.value:
                self._items.setdefault(leaf.item, {})[leaf.path] = rows
        if (value, digest) != (len(self._values), len(self._digests)):
            raise damaged_index(
                path,
                f"{value} values and {digest} digests",
                f"{len(self._values)} and {len(self._digests)}",
            )

    @property
    def file_count(self) -> int:
        """Number of files of the step."""
        return len(self._files) + len(self.directory.objects)

    @property
    @override
    def leaves(self) -> tuple[LeafRecord, ...]:
        return self.directory.leaves

    @cached_property
    @override
    def objects(self) -> tuple[ObjectRecord, ...]:
        rows = self._files.rows(0, len(self._files))
        fields = (rows[name].tolist() for name in ("folder", "size", "crc32c", "content"))
        try:
            values = [
                ObjectRecord(
                    name=self._named(folder, name.tobytes()),
                    size=size,
                    crc32c=f"{crc32c:08x}",
                    content=f"{CONTENT}{content:016x}",
                )
                for name, folder, size, crc32c, content in zip(rows["name"], *fields, strict=True)
            ]
        except ValidationError as exc:
            raise self.damaged(f"files of at most {MAX_BYTES} bytes", "a larger one") from exc
        return tuple(sorted([*self.directory.objects, *values], key=operator.attrgetter("name")))

    @property
    @override
    def shared_files(self) -> tuple[SharedFiles, ...]:
        rows = self._files.rows(0, len(self._files))
        names_by_origin: dict[int, list[str]] = {}
        for number in np.flatnonzero(rows["origin"]).tolist():
            row = rows[number]
            names_by_origin.setdefault(int(row["origin"]), []).append(
                self._named(int(row["folder"]), row["name"].tobytes())
            )
        origins = self.directory.origins
        shared = []
        for number, names in names_by_origin.items():
            if number > len(origins):
                raise self.damaged(f"one of {len(origins)} origins", str(number))
            shared.append((origins[number - 1], names))
        return tuple(
            SharedFiles(step=step, attempt=attempt, files=tuple(sorted(names)))
            for (step, attempt), names in sorted(shared)
        )

    def item(self, name: str) -> "ItemPlaces":
        """Return the locations of an item's values."""
        return ItemPlaces(self, name, self._items.get(name, {}))

    def check(self) -> None:
        """Read all parts of the index that were not read yet, and check that they are consistent.

        Raises:
            CorruptionError: a part is not what was written, or contradicts another.
        """
        for table in (self._files, self._values, self._digests):
            table.prefetch([(0, len(table))])
        _ = self.objects, self.shared_files
        for item, leaves in self._items.items():
            places = self.item(item)
            for path in leaves:
                places.refs(path)
        digest = self.directory.leaves_digest
        if digest is not None and digest != digest_of_leaves(self.leaves):
            raise self.damaged(
                f"leaves whose digest is {digest}", f"{digest_of_leaves(self.leaves)}"
            )

    def tables(self) -> tuple[Rows, Rows, Rows]:
        """Return all rows of files, of values and of digests.

        Raises:
            CorruptionError: some rows are not what was written.
        """
        files, values, digests = self._files, self._values, self._digests
        return files.rows(0, len(files)), values.rows(0, len(values)), digests.rows(0, len(digests))

    def prefetch(self, rows: Iterable["_LeafRows"]) -> None:
        """Read the rows of these leaves in few requests."""
        leaf_rows = list(rows)
        self._values.prefetch([(leaf.value, leaf.end[0]) for leaf in leaf_rows])
        self._digests.prefetch([(leaf.digest, leaf.end[1]) for leaf in leaf_rows])

    def small(self, rows: Iterable["_LeafRows"]) -> Iterable[tuple[ValueRef, int]]:
        """Return the locations and digests of leaves of one chunk each, in the given order."""
        leaf_rows = list(rows)
        # In the table's order, so that each page is used once.
        order = sorted(range(len(leaf_rows)), key=lambda number: leaf_rows[number].value)
        values = self._values.take([leaf_rows[number].value for number in order])
        digests = self._digests.take([leaf_rows[number].digest for number in order])
        places: list[tuple[ValueRef, int] | None] = [None] * len(leaf_rows)
        for number, (file, offset, length), digest in zip(order, values, digests, strict=True):
            places[number] = ValueRef(self._file(file), offset, length), digest
        return [place for place in places if place is not None]

    def refs(self, start: int, stop: int) -> list[ValueRef]:
        """Return the values' locations in some rows; files are relative to the step's folder."""
        rows = self._values.rows(start, stop).tolist()
        return [ValueRef(self._file(number), offset, length) for number, offset, length in rows]

    def digest_rows(self, start: int, stop: int) -> Rows:
        """Return the rows of digests from `start` to `stop`."""
        return self._digests.rows(start, stop)

    def damaged(self, expected: str, found: str) -> CorruptionError:
        """Return the error for an index that contradicts itself."""
        return damaged_index(self._path, expected, found)

    def _file(self, number: int) -> str:
        name = self._names.get(number)
        if name is None:
            (row,) = self._files.rows(number, number + 1)
            name = self._named(int(row["folder"]), row["name"].tobytes())
            self._names[number] = name
        return name

    def _named(self, folder: int, name: bytes) -> str:
        if folder >= len(self.directory.folders):
            raise self.damaged(f"one of {len(self.directory.folders)} folders", str(folder))
        return f"{self.directory.folders[folder]}/{name.hex()}"


class _LeafRows(NamedTuple):
    """Rows of a leaf in the tables, and their layout.

    Attributes:
        value: the leaf's first row in the table of values.
        digest: the leaf's first row in the table of digests.
        grid: number of shards per axis.
        chunks: number of a shard's chunks per axis.
    """

    value: int
    digest: int
    grid: Cell
    chunks: Cell

    @property
    def size(self) -> tuple[int, int]:
        """Number of the leaf's rows of values, and of digests."""
        shards = math.prod(self.grid)
        return shards, shards * math.prod(self.chunks)

    @property
    def end(self) -> tuple[int, int]:
        """Row after the leaf's last row of values, and of digests."""
        values, digests = self.size
        return self.value + values, self.digest + digests

    def row(self, cell: Sequence[int]) -> int | None:
        """Return the row of a shard's value; None if there is no such shard."""
        if len(cell) != len(self.grid):
            return None
        number = 0
        for index, size in zip(cell, self.grid, strict=True):
            if not 0 <= index < size:
                return None
            number = number * size + index
        return self.value + number


class _SmallLeaf(NamedTuple):
    """Location and digest of a leaf with one shard of one chunk."""

    ref: ValueRef
    digest: int


class ItemPlaces:
    """Locations of an item's values, and digests of their chunks, by the leaf's path."""

    def __init__(self, index: StepIndex, item: str, rows: Mapping[str, _LeafRows]) -> None:
        """Create the locations of an item; use `StepIndex.item`."""
        self._index, self._prefix, self._rows = index, f"{item}/", rows
        self._grids: dict[str, Rows] = {}
        self._small: dict[str, _SmallLeaf] = {}

    def prefetch(self, paths: Iterable[str]) -> None:
        """Read the rows of these leaves in few requests.

        Raises:
            CorruptionError: the rows are not what was written.
            StoreUnavailableError: the store gives no answer.
        """
        rows_by_path = {path: self._rows[path] for path in paths if path in self._rows}
        self._index.prefetch(rows_by_path.values())
        # Leaves of one chunk are looked up together: one by one, many of them would take long.
        small = {path: rows for path, rows in rows_by_path.items() if rows.size == (1, 1)}
        for path, (ref, digest) in zip(small, self._index.small(small.values()), strict=True):
            self._small[path] = _SmallLeaf(self._within(ref), digest)

    def total(self, path: str) -> int | None:
        """Return the digest of a whole leaf; None if the leaf has no digests here."""
        if path in self._small:
            return self._small[path].digest
        rows = self._rows.get(path)
        return None if rows is None else total(self._index.digest_rows(rows.digest, rows.end[1]))

    def expected(self, path: str, chunks: Sequence[int], index: Cell) -> int | None:
        """Return the digest of a chunk; None if there is none.

        Args:
            path: the leaf's path.
            chunks: the leaf's chunk shape, which is the index's own.
            index: the chunk's index in the leaf's grid of chunks.
        """
        if path in self._small:
            return self._small[path].digest if self._is_first(path, index) else None
        grid = self._grid(path)
        if grid is None or len(index) != grid.ndim:
            return None
        return int(grid[index]) if all(map(operator.lt, index, grid.shape)) else None

    def ref(self, path: str, cell: Cell) -> ValueRef | None:
        """Return a shard's location, its file relative to the item's folder; None if absent."""
        if path in self._small:
            return self._small[path].ref if self._is_first(path, cell) else None
        rows = self._rows.get(path)
        row = None if rows is None else rows.row(cell)
        return None if row is None else self._within(self._index.refs(row, row + 1)[0])

    def refs(self, path: str) -> dict[Cell, ValueRef]:
        """Return the locations of all shards of a leaf, by index in its grid of shards."""
        rows = self._rows.get(path)
        if rows is None:
            return {}
        cells = itertools.product(*map(range, rows.grid))
        refs = self._index.refs(rows.value, rows.end[0])
        return {cell: self._within(ref) for cell, ref in zip(cells, refs, strict=True)}

    def _is_first(self, path: str, cell: Cell) -> bool:
        return len(cell) == len(self._rows[path].grid) and not any(cell)

    def _within(self, ref: ValueRef) -> ValueRef:
        if not ref.file.startswith(self._prefix):
            raise self._index.damaged(f"a file of {self._prefix}", ref.file)
        return ref._replace(file=ref.file[len(self._prefix) :])

    def _grid(self, path: str) -> Rows | None:
        """Return the digests of a leaf's chunks as an array with an element per chunk; or None."""
        cached = self._grids.get(path)
        rows = self._rows.get(path)
        if cached is not None or rows is None:
            return cached
        flat = self._index.digest_rows(rows.digest, rows.end[1])
        rank = len(rows.grid)
        # (shards …, chunks of each …) -> shards and chunks of each axis side by side.
        axes = [
            axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair
        ]
        shape = tuple(map(operator.mul, rows.grid, rows.chunks))
        grid: Rows = flat.reshape((*rows.grid, *rows.chunks)).transpose(axes).reshape(shape)
        self._grids[path] = grid
        return grid
