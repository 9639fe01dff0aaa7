"""Arrays of one item of a step, opened through TensorStore; errors name the leaf."""

from __future__ import annotations

import difflib
import functools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import tensorstore as ts

from cairn.counts import count_text
from cairn.storage.arrays.boxes import chunk_count
from cairn.storage.arrays.chunk_digests import ChunkDigests
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.digests import digest_text, parse_digest
from cairn.storage.arrays.dtypes import dtype_named
from cairn.storage.arrays.four_bits import PackedArray, packed_axis, unpacked_shape
from cairn.storage.arrays.orbax_tree import StoredForm, StoredTree, array_name
from cairn.storage.errors import (
    CorruptionError,
    LeafNotFoundError,
    StorageError,
    UnsupportedFormatError,
    as_no_answer,
)
from cairn.storage.reading.checked_reads import CheckedReads
from cairn.storage.reading.direct_reads import DirectReads
from cairn.storage.reading.indexed_database import indexed_database
from cairn.storage.reading.limited_reads import LimitedRead, LimitedReads
from cairn.storage.reading.local_shards import LocalShards, StoredCut
from cairn.storage.reading.read_ahead import ReadAhead
from cairn.storage.runs.records.manifest import LeafRecord
from cairn.storage.runs.records.step_index import ItemPlaces
from cairn.storage.store.bounds import total_memory
from cairn.storage.store.deadlines import ReadProgress
from cairn.storage.store.disk.confinement import check_tree
from cairn.storage.store.uri import StoreURI

__all__ = ["NEXT_STEP", "NODE_POOL", "ItemArrays", "LeafInfo"]

NODE_POOL = "cache_pool#nodes"
"""Name of the cache for nodes of OCDBT trees; decoded chunks are not cached."""

NEXT_STEP = "Restore the step's files, or use another step."
MOST_LEAF_CHUNKS = 4 << 20
"""Most chunks of a leaf for TensorStore, which plans every chunk: 4 TiB in chunks of 1 MiB."""

MEMORY_OF_A_CHUNK = 4
"""TensorStore may decode chunks of at most this machine's memory divided by this number.

A chunk is in memory twice while it is decoded, and running out of memory ends the process.
"""

_OPENS_AT_ONCE = 256
_LOCAL_THREADS = max(2, min(4, os.cpu_count() or 2))


class DigestSource(Protocol):
    """Digests of an item's chunks, by the leaf's path."""

    def total(self, path: str) -> int | None:
        """Return the digest of a whole leaf; None if the leaf has no digests here."""

    def expected(self, path: str, chunks: Sequence[int], index: tuple[int, ...]) -> int | None:
        """Return a chunk's digest, by its index in the leaf's grid of chunks; None if absent."""


@dataclass(frozen=True)
class LeafInfo:
    """Description of a leaf, without its values.

    Attributes:
        path: the leaf's keys, joined by `path_of`.
        shape: global shape; () for a scalar.
        dtype: dtype of the values read; for typed PRNG keys that is uint32, their words.
        chunks: shape of the smallest part that can be decoded; None if nothing is stored (a leaf
            without elements).
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    chunks: tuple[int, ...] | None

    @property
    def nbytes(self) -> int:
        """Size in bytes of the whole leaf in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class ItemArrays:
    """Leaves of an item, by path. Safe for use by many threads."""

    def __init__(
        self,
        uri: StoreURI,
        tree: StoredTree,
        forms: Mapping[str, StoredForm],
        records: Mapping[str, LeafRecord] | None,
        context: ts.Context,
        digests: Callable[[], DigestSource] | None = None,
        places: ItemPlaces | None = None,
    ) -> None:
        """Create the item's arrays without opening them; `CheckpointReader` calls this.

        Args:
            uri: the item's folder.
            tree: Orbax's description of the item.
            forms: stored forms of leaves that are not stored as they are, by path.
            records: the manifest's records of the item's leaves, by path; None without a manifest.
            context: TensorStore context that has `NODE_POOL`.
            digests: returns the digests of the item's chunks; called once, when the first leaf is
                read. None if there are none. With digests, the manifest's leaves are checked by
                chunk.
            places: where the item's values lie according to the step's index; None if there is no
                index, so that the database in the item's folder is used.
        """
        self.uri = uri
        self._shown = str(uri)
        self.tree = tree
        self._forms = forms
        self._records = records
        self._context = context
        self._open: dict[str, ts.TensorStore] = {}
        self._progress = ReadProgress()
        self._digests = digests
        self._loaded: DigestSource | None = None
        self._places = places
        self._known_whole: set[str] = set()
        self._ahead: ReadAhead | None = None
        self._local = LocalShards(uri) if uri.scheme == "file" else None
        empty = {path for path, form in forms.items() if form.kind == "empty"}
        described = records if records is not None else {*tree.arrays, *empty}
        self._paths = dict.fromkeys(sorted(described))

    def where(self, path: str = "") -> str:
        """Return the name of a leaf of this item for errors."""
        return f"{self._shown}: {path}" if path else self._shown

    def infos(self) -> dict[str, LeafInfo]:
        """Return the descriptions of all leaves, by path; only leaves are opened that need it.

        Raises:
            CorruptionError: a leaf's description is damaged, or is not the manifest's.
            StoreUnavailableError: the store gives no answer.
        """
        leaf_infos = {path: self._told(path) for path in self._paths}
        self._open_all(path for path, info in leaf_infos.items() if info is None)
        return {path: info or self.info(path) for path, info in leaf_infos.items()}

    def info(self, path: str) -> LeafInfo:
        """Return the description of one leaf, read from its stored array.

        Raises:
            LeafNotFoundError: the item has no such leaf.
            CorruptionError: its description is damaged, or is not the manifest's.
            StoreUnavailableError: the store gives no answer.
        """
        if path not in self._paths:
            close = difflib.get_close_matches(path, self._paths, n=3)
            raise LeafNotFoundError(
                "no such leaf",
                path=self.where(),
                expected=f"one of its {count_text(len(self._paths), 'leaf')}",
                found=repr(path),
                next_step=f"Did you mean {' or '.join(close)}?" if close else "List its leaves.",
            )
        info = self._empty(path) or self._stored(path)
        self._check(info)
        return info

    def array(self, path: str) -> LimitedReads | PackedArray | CheckedReads | DirectReads:
        """Return the stored array of a leaf, open for reading, indexed as the leaf is.

        If the item has digests, reads are compared with them first.

        Raises:
            CorruptionError: the array is missing, its description is damaged, or it has too many
                chunks or lacks digests.
            UnsupportedFormatError: its chunks are too large for this machine's memory.
            StoreUnavailableError: the store gives no answer.
        """
        stored, form = self._opened(path), self._forms.get(path)
        # TensorStore plans every chunk of a read: a damaged description must not fill the memory.
        count = chunk_count(stored.shape, _grid_of(stored))
        if count > MOST_LEAF_CHUNKS:
            raise CorruptionError(
                "too many chunks in a leaf",
                path=self.where(path),
                expected=f"at most {MOST_LEAF_CHUNKS}",
                found=str(count),
                next_step=NEXT_STEP,
            )
        self._refuse_large_chunks(path, stored)
        limited = LimitedReads(stored, self._progress, self.uri)
        array: LimitedReads | PackedArray = limited
        shape: tuple[int, ...] = tuple(stored.shape)
        if form is not None and form.kind == "packed":
            array = PackedArray(limited, form.dtype, self._packed_axis(path, form, stored))
            shape = form.shape
        record = self._records.get(path) if self._records is not None else None
        if self._digests is None or record is None or record.chunks is None:
            return array
        chunks = record.chunks
        digests = self._digests_of(record, shape)

        def check(index: tuple[int, ...], digest: int) -> None:
            expected = digests.expected(path, chunks, index)
            if expected != digest:
                raise CorruptionError(
                    "stored data of a leaf is not what was saved",
                    path=f"{self.where(path)}, chunk {list(index)}",
                    expected="a digest of it" if expected is None else digest_text(expected),
                    found="none" if expected is None else digest_text(digest),
                    next_step=NEXT_STEP,
                )

        checked = CheckedReads(array, shape, chunks, stored.dtype.numpy_dtype.itemsize, check)
        cut = self.stored_cut(path) if self._local is not None and form is None else None
        if self._local is None or cut is None:
            return checked
        return DirectReads(checked, self._local, cut, self._pool)

    def _refuse_large_chunks(self, path: str, stored: ts.TensorStore) -> None:
        chunk = math.prod(_grid_of(stored)) * stored.dtype.numpy_dtype.itemsize
        most = total_memory() // MEMORY_OF_A_CHUNK
        if chunk > most:
            raise UnsupportedFormatError(
                "chunks that do not fit into memory",
                path=self.where(path),
                expected=f"at most {most} bytes, a quarter of the memory here",
                found=f"{chunk} bytes in a chunk",
                next_step="Read it on a machine with more memory, or save it anew: Cairn's chunks "
                "have some MiB.",
            )

    @functools.cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_LOCAL_THREADS, "cairn-reads")

    def prefetch(self, paths: Iterable[str]) -> None:
        """Read the locations of these leaves from the index, in few requests.

        Raises:
            CorruptionError: the step's index is not what was written.
            StoreUnavailableError: the store gives no answer.
        """
        if self._places is not None:
            self._places.prefetch(paths)

    def expect(self, paths: Iterable[str]) -> None:
        """Set the order in which leaves will be read; a local disk then reads ahead.

        Names that no leaf has are ignored.
        """
        if self._local is not None:
            stored = [path for path in paths if path in self._paths]
            self._ahead = ReadAhead(stored, lambda path: self.info(path).nbytes, self._ask)

    def starts(self, path: str) -> None:
        """Note that a leaf is about to be read, so that the disk reads the next ones ahead."""
        if self._ahead is not None:
            self._ahead.starts(path)

    def _ask(self, path: str) -> None:
        array = self.array(path)
        if isinstance(array, DirectReads):
            array.ask(tuple(slice(0, size) for size in self.info(path).shape))

    def is_whole(self, path: str) -> bool:
        """Return True if every chunk of a leaf is stored; chunks that are not stored read as zeros.

        Raises:
            CorruptionError: the leaf's description is damaged.
            StoreUnavailableError: the store gives no answer.
        """
        statistics = self._opened(path).storage_statistics(query_fully_stored=True)
        return bool(
            self._result(LimitedRead(statistics, self._progress, self.uri), path).fully_stored
        )

    def form(self, path: str) -> StoredForm | None:
        """Return the stored form of a leaf; None if it is stored as it is."""
        return self._forms.get(path)

    def stored_cut(self, path: str) -> StoredCut | None:
        """Return how to read a leaf's shards without TensorStore; None if they need decoding.

        Raises:
            CorruptionError: the leaf lacks digests, or they are not the manifest's.
        """
        record = self._records.get(path) if self._records is not None else None
        form = self._forms.get(path)
        if record is None or record.chunks is None or record.shards is None:
            return None
        if record.compression is not None:
            return None
        if self._digests is None or (form is not None and form.kind == "packed"):
            return None
        dtype, shape = dtype_named(record.dtype if form is None else "uint8"), record.shape
        if form is not None and form.kind == "key":
            dtype = np.dtype(np.uint32)
            shape = (*record.shape, *record.chunks[len(record.shape) :])
        chunks = record.chunks
        digests = self._digests_of(record, shape)
        return StoredCut(
            name=self._name(path),
            dtype=dtype,
            cut=ChunkShapes(record.shards, chunks),
            expected=lambda index: digests.expected(path, chunks, index),
            where=self.where(path),
            place=None if self._places is None else functools.partial(self._places.ref, path),
        )

    def read_box(self, info: LeafInfo) -> tuple[int, ...]:
        """Return the shape of the boxes in which to read a leaf: a shard, or whole chunks."""
        record = self._records.get(info.path) if self._records is not None else None
        if record is not None and record.shards is not None:
            return record.shards
        return info.chunks or info.shape

    def wait(self, pending: Any, path: str) -> np.ndarray:
        """Wait for a read of the leaf's array, and return it in the leaf's own dtype.

        Raises:
            CorruptionError: data of the leaf is missing or damaged.
            StoreUnavailableError: the store gives no answer.
        """
        stored: np.ndarray = self._result(pending, path)
        match self._forms.get(path):
            case StoredForm(kind="widened", dtype=name):
                return stored.astype(dtype_named(name))
            case StoredForm(kind="bits", dtype=name):
                return stored.view(dtype_named(name))
            case _:
                return stored

    def _digests_of(self, record: LeafRecord, shape: tuple[int, ...]) -> DigestSource:
        """Return the item's digests; raise CorruptionError if the leaf's are not complete."""
        if self._loaded is None:
            self._loaded = self._digests() if self._digests else ChunkDigests()
        path, chunks = record.path, record.chunks or ()
        if path in self._known_whole:
            return self._loaded
        total = self._loaded.total(path)
        if total is None or len(chunks) != len(shape) or 0 in chunks:
            raise CorruptionError(
                "stored data of a leaf can't be checked",
                path=self.where(path),
                expected=f"digests of its chunks of {list(chunks)}, as in the manifest",
                found="none" if total is None else f"a stored array of {list(shape)}",
                next_step=NEXT_STEP,
            )
        recorded = record.digest or ""
        if recorded != digest_text(total) and parse_digest(recorded) is not None:
            raise CorruptionError(
                "digests of a leaf that are not the manifest's",
                path=self.where(path),
                expected=record.digest or "",
                found=digest_text(total),
                next_step=NEXT_STEP,
            )
        self._known_whole.add(path)
        return self._loaded

    def _told(self, path: str) -> LeafInfo | None:
        """Return a leaf's description from metadata alone; None if the leaf must be opened."""
        record = self._records.get(path) if self._records is not None else None
        form = self._forms.get(path)
        # The words of a typed PRNG key are an axis that the manifest's shape lacks: it must be
        # opened.
        is_key = form is not None and form.kind == "key"
        if record is None or record.chunks is None or is_key:
            return self._empty(path)
        return LeafInfo(path, record.shape, dtype_named(record.dtype), record.chunks)

    def _empty(self, path: str) -> LeafInfo | None:
        """Return the description of a leaf without elements (not stored); None for others."""
        form = self._forms.get(path)
        if form is None or form.kind != "empty":
            return None
        return LeafInfo(path, form.shape, dtype_named(form.dtype), None)

    def _stored(self, path: str) -> LeafInfo:
        array = self._opened(path)
        form = self._forms.get(path)
        shape = tuple(array.shape)
        grid = _grid_of(array)
        if form is not None and form.kind == "packed":
            axis = self._packed_axis(path, form, array)
            shape, grid = form.shape, unpacked_shape(grid, axis)
        carried = form is not None and form.kind in ("widened", "bits", "packed")
        dtype = dtype_named(form.dtype) if form and carried else array.dtype.numpy_dtype
        return LeafInfo(path, shape, dtype, grid)

    def _check(self, info: LeafInfo) -> None:
        """Raise CorruptionError if the stored leaf's shape or dtype is not the manifest's."""
        record = self._records.get(info.path) if self._records is not None else None
        form = self._forms.get(info.path)
        is_key = form is not None and form.kind == "key"
        if record is None or (is_key and info.shape[: len(record.shape)] == record.shape):
            return
        if is_key or (info.shape, info.dtype.name) != (record.shape, record.dtype):
            raise CorruptionError(
                "not the leaf that was saved",
                path=self.where(info.path),
                expected=f"{record.dtype}{list(record.shape)} as in the manifest",
                found=f"{info.dtype.name}{list(info.shape)}",
                next_step=NEXT_STEP,
            )

    def _packed_axis(self, path: str, form: StoredForm, array: ts.TensorStore) -> int:
        try:
            return packed_axis(form.shape, tuple(array.shape))
        except ValueError as exc:
            raise CorruptionError(
                "not the leaf that was saved",
                path=self.where(path),
                expected=f"{form.dtype}{list(form.shape)}, two in a byte",
                found=f"bytes{list(array.shape)}",
                next_step=NEXT_STEP,
            ) from exc

    def _opened(self, path: str) -> ts.TensorStore:
        self._open_all((path,))
        return self._open[path]

    def _open_all(self, paths: Iterable[str]) -> None:
        """Open the arrays of leaves that are not open yet, many at a time."""
        closed = [path for path in paths if path not in self._open]
        for start in range(0, len(closed), _OPENS_AT_ONCE):
            window = closed[start : start + _OPENS_AT_ONCE]
            pending = [(path, self._opening(path)) for path in window]
            self._open.update({path: self._result(future, path) for path, future in pending})

    def _name(self, path: str) -> str:
        """Return Orbax's name of a leaf's array."""
        return self.tree.arrays.get(self.tree.current(path), array_name(path))

    @functools.cached_property
    def _values_spec(self) -> dict[str, Any]:
        """TensorStore spec of the item's folder."""
        check_tree(self.uri)
        return self.uri.kvstore_spec()

    def _opening(self, path: str) -> LimitedRead:
        name = self._name(path)
        base = self._values_spec
        kvstore: dict[str, Any] = {**base, "path": f"{base['path']}{name}/"}
        record = self._records.get(path) if self._records is not None else None
        if self._places is not None and record is not None:
            base = indexed_database(
                base, name, record, self._forms.get(path), self._places, self._context
            )
        if self.tree.ocdbt:
            kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": NODE_POOL}
        spec = {
            "driver": "zarr3" if self.tree.zarr3 else "zarr",
            "kvstore": kvstore,
            # Without this an absent chunk reads as zeros.
            "fill_missing_data_reads": self.tree.sparse,
        }
        try:
            opening = ts.open(spec, open=True, read=True, context=self._context)
        except ValueError as exc:  # the array's name is not possible in any store
            raise self._unreadable(exc, path) from exc
        return LimitedRead(opening, self._progress, self.uri)

    def _result(self, pending: Any, path: str) -> Any:
        try:
            return pending.result()
        except (ValueError, OSError) as exc:
            raise self._unreadable(exc, path) from exc

    def _unreadable(self, exc: Exception, path: str) -> StorageError:
        silence = as_no_answer(exc, path=self.where(path))
        if silence is not None:
            return silence
        return CorruptionError(
            "stored data of a leaf is missing or damaged",
            path=self.where(path),
            expected="chunks that are all there and pass their checks",
            # TensorStore appends its whole spec to a message: cut that off.
            found=" ".join(str(exc).partition(" [tensorstore_spec=")[0].split())[:400],
            next_step=NEXT_STEP,
        )


def _grid_of(array: ts.TensorStore) -> tuple[int, ...]:
    """Return the shape of the smallest part of an array that can be decoded."""
    shape = tuple(array.shape)
    chunks = array.chunk_layout.read_chunk.shape or shape
    return tuple(chunk or size for chunk, size in zip(chunks, shape, strict=True))
