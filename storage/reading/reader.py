"""Reader of any leaf of a stored step: whole, by slice or in bounded blocks.

It reads what Orbax writes: zarr arrays (version 3, and version 2 of older checkpoints) in an OCDBT
database or in plain folders. TensorStore checks the crc32c of chunks that have one as it decodes
them. An absent chunk is an error, never zeros. If a manifest has digests of chunks, no part of a
chunk is returned before its digest was compared. A step with an index is read by the index; none of
Orbax's own metadata is needed then. See ADR 0008 and 18.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import google_crc32c
import numpy as np
import tensorstore as ts

from cairn.counts import count_text
from cairn.storage.arrays.boxes import Box
from cairn.storage.arrays.chunk_digests import FILE_PREFIX, ChunkDigests
from cairn.storage.arrays.ocdbt import MANIFEST_FILE
from cairn.storage.arrays.orbax_tree import (
    JSON_FILES,
    META_ITEM,
    STEP_METADATA,
    STRINGS_FILE,
    TREE_METADATA,
    StepMetadata,
    StoredForm,
    StoredTree,
    nest,
    parse_custom,
    parse_json_object,
    parse_step_metadata,
    parse_tree_metadata,
)
from cairn.storage.errors import (
    CorruptionError,
    InvalidSliceError,
    LeafNotFoundError,
    NotACheckpointError,
    NotFoundError,
    RunNotFoundError,
    StepNotFoundError,
    StorageError,
)
from cairn.storage.notebooks import MAX_ROWS, html_table, never_raises, size_cell
from cairn.storage.reading.array_index import Index, explicit_index, permutation, selected_box
from cairn.storage.reading.block_stream import BlockPlan, stream_blocks, stream_boxes
from cairn.storage.reading.indexed_database import MEMORY
from cairn.storage.reading.item_arrays import NEXT_STEP, NODE_POOL, ItemArrays, LeafInfo
from cairn.storage.reading.step_files import check_step_files
from cairn.storage.runs.records.layout import (
    COMMIT_FILE,
    INDEX_FILE,
    iterator_file,
    manifest_file,
    parse_ref,
)
from cairn.storage.runs.records.manifest import Manifest, ObjectRecord, PlainStep
from cairn.storage.runs.records.placed import read_record
from cairn.storage.runs.records.step_contents import StepContents
from cairn.storage.runs.records.step_index import StepIndex, open_contents
from cairn.storage.runs.resolution import resolve_checkpoint
from cairn.storage.runs.step_files import is_kept
from cairn.storage.store.bounds import check_not_oversized
from cairn.storage.store.deadlines import deadline_after
from cairn.storage.store.disk.confinement import source_folder
from cairn.storage.store.objects import ObjectStore, store_context
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI, parse_uri

__all__ = ["CheckpointReader", "LeafInfo", "manifest_at"]

_STEP_FOLDER = re.compile(r"attempts/([0-9]+)/([0-9]+)$")

_FILES_AT_ONCE = 16
_SHOWN_SECONDS = 5.0  # how long a notebook waits for a store
_CONTEXT = {
    MEMORY: {},
    NODE_POOL: {"total_bytes_limit": 32 << 20},
    # A thread that decodes holds a chunk: on a machine with many cores their number must not
    # decide how much memory an export takes.
    "data_copy_concurrency": {"limit": min(8, os.cpu_count() or 1)},
}


class CheckpointReader:
    """Reader of the leaves of a committed step. Create it by `open`; safe for use by many threads.

    Attributes:
        uri: the step's folder; for an imported step the owner's folder.
        manifest: the step's manifest; None if none was passed.
        contents: the leaves and files that the manifest names.
    """

    def __init__(
        self,
        uri: StoreURI,
        step: StepMetadata,
        manifest: Manifest | None,
        contents: StepContents | None = None,
        plain: PlainStep | None = None,
        kept: StoreURI | None = None,
    ) -> None:
        self.uri = uri
        self.manifest = manifest
        self.contents = contents
        self._plain = plain
        self._kept = uri if kept is None else kept
        self._step = step
        self._names = frozenset(step.items or ())
        self._objects = ObjectStore(uri)
        self._context = ts.Context(_CONTEXT, parent=store_context())
        self._items: dict[str, ItemArrays | None] = {}
        self._index = contents if isinstance(contents, StepIndex) else None
        small_files: tuple[ObjectRecord, ...] = ()
        if isinstance(contents, StepIndex):
            small_files = contents.directory.objects
        elif contents is not None:
            small_files = contents.objects
        self._files = {record.name: record for record in small_files}

    def __repr__(self) -> str:
        return f"CheckpointReader({str(self.uri)!r})"

    @never_raises
    def _repr_html_(self) -> str:
        with deadline_after(_SHOWN_SECONDS):
            items = {item: self.leaves(item) for item in self.items()}
        sizes = {item: sum(leaf.nbytes for leaf in tree.values()) for item, tree in items.items()}
        leaves = [(item, leaf) for item, tree in items.items() for leaf in tree.values()]
        return html_table(
            f"Checkpoint {self.uri}",
            [
                (item, f"{count_text(len(tree), 'leaf')}, {size_cell(sizes[item])}")
                for item, tree in items.items()
            ],
            ("item", "leaf", "dtype", "shape", "size"),
            [
                (item, leaf.path, leaf.dtype.name, leaf.shape, size_cell(leaf.nbytes))
                for item, leaf in leaves[:MAX_ROWS]
            ],
            more=max(0, len(leaves) - MAX_ROWS),
        )

    @classmethod
    def open(
        cls,
        step: StoreURI | str | os.PathLike[str],
        manifest: Manifest | None = None,
        *,
        whole: bool = False,
    ) -> CheckpointReader:
        """Return a reader of a step, by its address or its folder.

        Args:
            step: "run/steps/N", "run@alias" or "run@latest"; or a folder, such as `Run.step_uri` of
                a step: an Orbax checkpoint, which holds `commit_success.txt`, or what a run keeps
                of an imported step.
            manifest: the step's manifest. With it, leaves are listed without opening them, and
                stored data is checked against it. If it has an index, only the index and the
                requested data are read. Otherwise all files except the large ones of values are
                checked now.
            whole: whether most leaves will be read; a large index is then read at once.

        Raises:
            NotFoundError: there is no such folder, run, alias or step.
            NotACheckpointError: the folder is not a committed checkpoint.
            StepDamagedError: the best step, or the latest, is damaged.
            CorruptionError: the step's metadata can't be read, or its files are not the manifest's.
            StoreUnavailableError: the store gives no answer.
        """
        step_uri = step if isinstance(step, StoreURI) else parse_uri(step)
        if manifest is None and step_uri.confinement is None:
            step_uri, manifest = _named(step, step_uri)
        if manifest is None:
            try:
                return cls._open(step_uri, None, None, check=False)
            except (NotACheckpointError, StepNotFoundError):
                # The files of an imported step lie elsewhere, and only its manifest says where.
                manifest = manifest_at(step_uri)
                if manifest is None or manifest.source is None:
                    raise
        try:
            contents = open_contents(step_uri, manifest, whole=whole)
        except CorruptionError as exc:
            names = {entry.name for entry in open_files(step_uri).list()}
            if not names & {INDEX_FILE, COMMIT_FILE, STEP_METADATA}:
                raise _no_checkpoint(step_uri) from exc
            raise
        if isinstance(contents, StepIndex):
            return cls.of(step_uri, manifest, contents)
        return cls._open(step_uri, manifest, contents, check=True)

    @classmethod
    def _open(
        cls,
        step_uri: StoreURI,
        manifest: Manifest | None,
        contents: StepContents | None,
        *,
        check: bool,
    ) -> CheckpointReader:
        """Return a reader that uses Orbax's metadata; `check`: compare the step's files first."""
        if manifest is not None and manifest.plain is not None:
            if check and contents is not None:
                check_step_files(step_uri, contents.objects, manifest.source)
            return cls.of_plain(step_uri, manifest.plain, manifest, contents)
        files = ObjectStore(step_uri).read_many([STEP_METADATA, COMMIT_FILE])
        described, marker = files[STEP_METADATA], files[COMMIT_FILE]
        # Compare the files before any of them is parsed.
        if check and contents is not None and (described or marker):
            check_step_files(step_uri, contents.objects)
        step = StepMetadata(None, committed=False)
        if described is not None:
            step = parse_step_metadata(described.value, path=step_uri / STEP_METADATA)
        # Older Orbax commits on a disk by a rename alone.
        renamed = step_uri.scheme == "file" and step.committed and "-tmp" not in step_uri.name
        if marker is None and not renamed:
            raise _no_checkpoint(step_uri)
        if step.items is None:
            folders = (entry.name for entry in open_files(step_uri).list() if entry.is_dir)
            step = dataclasses.replace(step, items=tuple(folders))
        reader = cls(step_uri, step, manifest, contents)
        if described is not None:
            reader._checked(STEP_METADATA, described.value)
        return reader

    @classmethod
    def of(cls, step_uri: StoreURI, manifest: Manifest, contents: StepContents) -> CheckpointReader:
        """Create the reader of a step whose manifest and contents were read already.

        Args:
            step_uri: folder of the step.
            manifest: manifest of the step.
            contents: the leaves and files that the manifest names.

        Raises:
            StorageError: as `open`.
        """
        if not isinstance(contents, StepIndex):
            return cls._open(step_uri, manifest, contents, check=False)
        step = StepMetadata(
            manifest.items,
            committed=True,
            cairn_items=frozenset(manifest.items),
            forms=contents.directory.forms,
            meta_digest=contents.directory.meta_digest,
        )
        return cls(step_uri, step, manifest, contents)

    @classmethod
    def of_plain(
        cls,
        step_uri: StoreURI,
        plain: PlainStep,
        manifest: Manifest | None = None,
        contents: StepContents | None = None,
    ) -> CheckpointReader:
        """Create the reader of a step that plain Orbax wrote.

        Args:
            step_uri: the step's folder in its run.
            plain: layout of the step, with the owner's folder.
            manifest: manifest of the step; None before it has one.
            contents: the leaves and files that the manifest names; None without a manifest.
        """
        source = step_uri if plain.source is None else source_folder(step_uri, plain.source)
        step = StepMetadata((*plain.trees, *plain.json_files), committed=True)
        return cls(source, step, manifest, contents, plain, step_uri)

    @property
    def meta_digest(self) -> str | None:
        """Digest of the JSON item, as the save recorded it; None if it did not."""
        return self._step.meta_digest

    @property
    def is_adopted(self) -> bool:
        """True if plain Orbax saved the step, so that any item may be a tree."""
        return self._plain is not None

    def names(self) -> list[str]:
        """Return the names of all items, including JSON items."""
        return sorted(self._names)

    def arrays(self, item: str) -> ItemArrays | None:
        """Return the arrays of an item; None if the step has no tree of that name.

        Raises:
            CorruptionError: the item's metadata can't be read.
            StoreUnavailableError: the store gives no answer.
        """
        return self._find(item)

    def items(self) -> list[str]:
        """Return the names of the items that are trees of arrays, without JSON items."""
        return [name for name in sorted(self._names) if self._find(name) is not None]

    def leaves(self, item: str) -> dict[str, LeafInfo]:
        """Return every array of an item, by path in sorted order.

        Leaves that are text or None, and empty containers, are left out.

        Raises:
            LeafNotFoundError: the step has no such item.
            CorruptionError: a leaf's description is damaged, or is not the manifest's.
            StoreUnavailableError: the store gives no answer.
        """
        return self._item(item).infos()

    def leaf(self, item: str, path: str) -> LeafInfo:
        """Return the description of one leaf.

        Raises:
            LeafNotFoundError: the step has no such item or leaf.
            CorruptionError: the leaf's description is damaged, or is not the manifest's.
            StoreUnavailableError: the store gives no answer.
        """
        return self._item(item).info(path)

    def read(self, item: str, path: str, index: Index | None = None) -> np.ndarray:
        """Read a leaf, or the part of it that `index` selects, as a C-contiguous array.

        Args:
            item: name of the item, such as "model".
            path: the leaf's path.
            index: integers and slices as in NumPy, with positive steps; None: the whole leaf.

        Raises:
            LeafNotFoundError: the step has no such item or leaf.
            InvalidSliceError: `index` does not fit the leaf's shape.
            CorruptionError: stored bytes are missing, fail their check or are not what was saved.
            StoreUnavailableError: the store gives no answer.
        """
        stored = self._item(item)
        info = stored.info(path)
        part = explicit_index(... if index is None else index, info.shape, path=stored.where(path))
        if info.chunks is None:
            return np.empty(info.shape, info.dtype)[part]
        return stored.wait(stored.array(path)[part].read(order="C"), path)

    def iter_blocks(
        self,
        item: str,
        path: str,
        *,
        max_bytes: int,
        axis: int = 0,
        transpose: bool | Sequence[int] = False,
        index: Index | None = None,
    ) -> Iterator[np.ndarray]:
        """Yield a leaf in consecutive C-contiguous blocks of up to `max_bytes`, with all its axes.

        Reads follow the stored chunks: whole rows of chunks are read ahead and returned in slices,
        so each chunk is decoded and checked once, unless a row of chunks is larger than
        `boxes.MAX_CHUNK_ROW_BYTES`. Besides the caller's blocks, memory holds about twice the
        larger of `boxes.MAX_CHUNK_ROW_BYTES` and `max_bytes`, and a few chunks.

        Args:
            item: name of the item.
            path: the leaf's path.
            max_bytes: most bytes of a block, which has at least one element.
            axis: the axis of the result along which blocks are cut first. With 0, the flattened
                blocks one after another are the flattened result in C order.
            transpose: reverse the axes of the leaf (True) or permute them as `np.transpose` does.
            index: part of the leaf to read; None: the whole leaf. An integer selects one position
                and keeps its axis with size 1, so that `transpose` and `axis` always count the
                leaf's own axes.

        Raises:
            LeafNotFoundError: the step has no such item or leaf.
            InvalidSliceError: `index`, `axis` or `transpose` does not fit the leaf's shape.
            CorruptionError: stored bytes are missing, fail their check or are not what was saved.
            StoreUnavailableError: the store gives no answer.
        """
        stored = self._item(item)
        info = stored.info(path)
        where = stored.where(path)
        box = selected_box(... if index is None else index, info.shape, path=where)
        axes = permutation(transpose, len(info.shape), path=where)
        if axis != 0 and axis not in axes:
            raise InvalidSliceError(
                "no such axis", path=where, expected=f"one of {sorted(axes)}", found=str(axis)
            )
        if info.chunks is None:
            return iter(())
        plan = BlockPlan(box, info.chunks, axes, axis, info.dtype.itemsize, max_bytes)
        array = stored.array(path)
        stored.starts(path)
        return stream_blocks(array, plan, lambda pending: stored.wait(pending, path))

    def expect(self, item: str, paths: Iterable[str]) -> None:
        """Announce the order in which leaves will be read by `iter_blocks`.

        A local disk then reads ahead while the processor works on a leaf; other stores ignore the
        order. Leaves may be read in another order, or not at all. Names that no leaf has are
        ignored.

        Raises:
            LeafNotFoundError: the step has no such item.
        """
        self._item(item).expect(paths)

    def iter_pieces(
        self, item: str, path: str, *, index: Index | None = None
    ) -> Iterator[np.ndarray]:
        """Yield each element of a leaf once, in the order of the stored chunks.

        Use it for results that don't depend on an element's position: no data is copied to reorder
        it, and each chunk is decoded and checked once. Besides the caller's piece this takes a few
        pieces of 8 MiB each, or of one chunk if that is more, and the memory that decoding threads
        keep of freed pieces: some 150 MiB in all, however large the leaf is.

        Args:
            item: name of the item.
            path: the leaf's path.
            index: as in `iter_blocks`.

        Raises:
            LeafNotFoundError: the step has no such item or leaf.
            InvalidSliceError: `index` does not fit the leaf's shape.
            CorruptionError: stored bytes are missing, fail their check or are not what was saved.
            StoreUnavailableError: the store gives no answer.
        """
        return map(itemgetter(1), self.iter_boxes(item, path, index=index))

    def iter_boxes(
        self, item: str, path: str, *, index: Index | None = None
    ) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield what `iter_pieces` yields, each piece with its box in the leaf's coordinates.

        Args:
            item: name of the item.
            path: the leaf's path.
            index: as in `iter_blocks`.

        Raises:
            LeafNotFoundError, InvalidSliceError, CorruptionError, StoreUnavailableError: as
                `iter_pieces`.
        """
        stored = self._item(item)
        info = stored.info(path)
        box = selected_box(... if index is None else index, info.shape, path=stored.where(path))
        if info.chunks is None:
            return iter(())
        array, size = stored.array(path), info.dtype.itemsize
        return stream_boxes(
            array, box, info.chunks, size, lambda pending: stored.wait(pending, path)
        )

    def texts(self, item: str) -> dict[str, str]:
        """Return the text leaves of an imported item, by path; steps that Cairn saved have none.

        Raises:
            LeafNotFoundError: the step has no such item.
            CorruptionError: the texts can't be read.
            StoreUnavailableError: the store gives no answer.
        """
        strings = self._item(item).tree.strings if self.is_adopted else {}
        if not strings:
            return {}
        folder = self._folder(item)
        name = f"{folder}/{STRINGS_FILE}" if folder else STRINGS_FILE
        stored = parse_json_object(self._file(name) or b"", path=self.uri / name)
        lost = sorted(path for path, key in strings.items() if not isinstance(stored.get(key), str))
        if lost:
            raise CorruptionError(
                "text of a leaf is missing",
                path=self.uri / name,
                expected=f"the text of {count_text(len(strings), 'leaf')}",
                found=f"none for {', '.join(lost[:5])}",
                next_step=NEXT_STEP,
            )
        return {path: str(stored[key]) for path, key in strings.items()}

    def meta(self) -> dict[str, Any]:
        """Return the JSON that was saved beside the trees; {} if there is none.

        Raises:
            CorruptionError: the JSON is not an object, or fails its check.
            StoreUnavailableError: the store gives no answer.
        """
        if self._plain is not None:
            described = {
                item: parse_json_object(self._file(name) or b"", path=self.uri / name)
                for item, name in self._plain.json_files.items()
            }
            # One entry per JSON item, unless "meta" is the only item.
            return described[META_ITEM] if set(described) == {META_ITEM} else described
        if META_ITEM not in self._names:
            return {}
        for name in JSON_FILES:
            data = self._file(f"{META_ITEM}/{name}")
            if data is not None:
                return parse_json_object(data, path=self.uri / META_ITEM / name)
        return self._meta_tree()

    def custom_metadata(self) -> dict[str, Any]:
        """Return the custom metadata that Orbax stores with a step; {} if there is none.

        Raises:
            CorruptionError: the step's metadata is not a JSON object, or fails its check.
            StoreUnavailableError: the store gives no answer.
        """
        data = self._file(STEP_METADATA)
        return {} if data is None else parse_custom(data, path=self.uri / STEP_METADATA)

    @property
    def iterators(self) -> Mapping[str, int]:
        """Data iterators whose position was saved -> the number of processes that saved it."""
        return {} if self.manifest is None else dict(self.manifest.iterators)

    def iterator_states(self, name: str, processes: Iterable[int] | None = None) -> list[bytes]:
        """Return the states (positions) of a data iterator, one for each process, as JSON.

        Args:
            name: name of the iterator.
            processes: numbers of the processes whose states to read; None: all, in order. Only one
                file is read of several with the same content.

        Raises:
            NotFoundError: the step has no such iterator, or no such process saved it.
            CorruptionError: a state is missing, or not what was saved.
            StoreUnavailableError: the store gives no answer.
        """
        count = self.iterators.get(name, 0)
        numbers = list(range(count) if processes is None else processes)
        if not count or not all(0 <= process < count for process in numbers):
            saved = (
                f"{iterator!r} of {count_text(number, 'process')}"
                for iterator, number in self.iterators.items()
            )
            raise NotFoundError(
                "no such position of an iterator",
                path=self.uri,
                expected=", ".join(saved) or "no iterator: the step was saved without",
                found=f"{name!r} of processes {numbers}"[:200],
                next_step="Ask for what the step has.",
            )
        files = [iterator_file(name, process, count) for process in numbers]
        contents: list[object] = []  # equal for files with the same content
        for file in files:
            record = self._files.get(file)
            contents.append(
                file if record is None else (record.size, record.crc32c, record.content)
            )
        # Reversed, so that of files with equal contents the first is read.
        distinct = dict(zip(reversed(contents), reversed(files), strict=True))
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            read = dict(zip(distinct, pool.map(self._recorded, distinct.values()), strict=True))
        return [read[content] for content in contents]

    def _recorded(self, file: str) -> bytes:
        data = self._file(file) if file in self._files else None
        if data is None:
            raise CorruptionError(
                "a file of the step is not recorded",
                path=self.uri / file,
                expected="the state of an iterator, as the manifest says",
                found="none",
                next_step=NEXT_STEP,
            )
        return data

    def _meta_tree(self) -> dict[str, Any]:
        """Return the JSON of plain Orbax, which stores a dict of numbers as a tree of arrays."""
        tree = self._item(META_ITEM).tree
        values: dict[str, Any] = dict(tree.empties)
        if tree.strings:
            name = f"{META_ITEM}/{STRINGS_FILE}"
            texts = parse_json_object(self._file(name) or b"", path=self.uri / name)
            values |= {path: texts.get(key) for path, key in tree.strings.items()}
        values |= {path: self.read(META_ITEM, path).tolist() for path in tree.arrays}
        nested = nest(values, tree.sequences)
        return nested if isinstance(nested, dict) else {"": nested}

    def _item(self, name: str) -> ItemArrays:
        item = self._find(name)
        if item is None:
            raise LeafNotFoundError(
                "no such item",
                path=self.uri,
                expected=f"one of {self.items()}",
                found=repr(name),
                next_step="Ask for one of these.",
            )
        return item

    def _find(self, name: str) -> ItemArrays | None:
        """Return the item, or None if the step has no tree of that name."""
        if name not in self._names:
            return None
        if name not in self._items:
            folder = self._folder(name)
            file = f"{folder}/{TREE_METADATA}" if folder else TREE_METADATA
            # With an index, Orbax's description of the tree is not needed.
            data = None if self._index is not None else self._file(file)
            tree = None
            if data is not None:
                tree = parse_tree_metadata(data, path=self.uri / file)
            elif name in self._step.cairn_items and name != META_ITEM:
                tree = StoredTree()
            self._items[name] = None if tree is None else self._arrays_of(name, tree)
        return self._items[name]

    def _folder(self, item: str) -> str:
        """Return the folder of an item within the step's folder."""
        return item if self._plain is None else self._plain.trees.get(item, item)

    def _arrays_of(self, name: str, tree: StoredTree) -> ItemArrays:
        records = None
        if self.contents is not None:
            leaves = (record for record in self.contents.leaves if record.item == name)
            records = {record.path: record for record in leaves}
        forms = self._step.forms.get(name, {})
        if self._index is not None:
            places = self._index.item(name)
            uri, context = self.uri / name, self._context
            return ItemArrays(uri, tree, forms, records, context, lambda: places, places)
        files = [file for file in self._files if file.startswith(f"{name}/{FILE_PREFIX}")]
        digests = functools.partial(self._digests_in, files) if files else None
        if self._plain is not None:
            tree = self._plain_tree(name, tree, self._plain)
            keys = self._plain.keys.get(name, {})
            leaf_records = records or {}
            forms = {
                path: StoredForm("key", leaf_records[path].shape, impl)
                for path, impl in keys.items()
                if path in leaf_records
            }
        folder = self._folder(name)
        uri = self.uri / folder if folder else self.uri
        return ItemArrays(uri, tree, forms, records, self._context, digests)

    def _plain_tree(self, item: str, tree: StoredTree, plain: PlainStep) -> StoredTree:
        """Return the part of a folder's tree that is this imported item.

        The tree may hold two items.

        Raises:
            CorruptionError: the tree lacks arrays that the item should have.
        """
        folder = plain.trees[item]
        name = f"{folder}/{MANIFEST_FILE}" if folder else MANIFEST_FILE
        # Older releases did not record how arrays are stored. Only the manifest's files count: a
        # file that was added since proves nothing.
        is_described = self.contents is not None
        ocdbt = name in self._files if is_described else self._objects.read(name) is not None
        tree = dataclasses.replace(tree, ocdbt=ocdbt)
        own = plain.arrays.get(item)
        if own is not None:
            unknown = sorted({*own.values()} - {*tree.arrays.values()})
            if unknown:
                raise CorruptionError(
                    "arrays that the step does not have",
                    path=self.uri / folder if folder else self.uri,
                    expected="arrays that Orbax's metadata names",
                    found=", ".join(unknown[:5]),
                    next_step=NEXT_STEP,
                )
            return dataclasses.replace(tree, arrays=own, strings={}, empties={})
        tree = tree.without_variables()
        others = {
            array
            for other, arrays in plain.arrays.items()
            if plain.trees[other] == folder
            for array in arrays.values()
        }
        rest = {path: array for path, array in tree.arrays.items() if array not in others}
        return dataclasses.replace(tree, arrays=rest)

    def _digests_in(self, files: Sequence[str]) -> ChunkDigests:
        with ThreadPoolExecutor(min(_FILES_AT_ONCE, len(files))) as pool:
            contents = list(pool.map(self._file, files))
        parts = [
            ChunkDigests.parse(data or b"", path=self.uri / file)
            for file, data in zip(files, contents, strict=True)
        ]
        first, *others = parts
        return first.merged(*others) if others else first

    def _file(self, name: str) -> bytes | None:
        """Return the content of a small file of the step; None if it does not exist.

        If the manifest has the file, the content is compared with its record.
        """
        # Digests of an imported step are in the run; all other files are in the owner's folder.
        kept = self._kept != self.uri and is_kept(name)
        objects = ObjectStore(self._kept) if kept else self._objects
        content = objects.read(name)
        if content is None and self._index is not None and name in self._files:
            raise CorruptionError(
                "a file of the step is missing",
                path=self.uri / name,
                expected=f"{self._files[name].size} bytes",
                found="none",
                next_step=NEXT_STEP,
            )
        return None if content is None else self._checked(name, content.value)

    def _checked(self, name: str, data: bytes) -> bytes:
        """Return `data` if it is what the manifest records; raise CorruptionError if not."""
        check_not_oversized(data, self.uri / name)
        record = self._files.get(name)
        crc = f"{google_crc32c.value(data):08x}"
        if record is not None and (len(data), crc) != (record.size, record.crc32c or crc):
            raise CorruptionError(
                "changed since it was saved",
                path=self.uri / name,
                expected=f"{record.size} bytes, crc32c {record.crc32c}",
                found=f"{len(data)} bytes, crc32c {crc}",
                next_step=NEXT_STEP,
            )
        return data


def manifest_at(step_uri: StoreURI) -> Manifest | None:
    """Return the manifest of a step by its folder in a run; None if it has none.

    Raises:
        CorruptionError, UnsupportedFormatError: the manifest can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    match = _STEP_FOLDER.search(step_uri.path)
    if match is None:
        return None
    name = manifest_file(int(match[2]), int(match[1]))
    stored = read_record(ObjectStore.open(step_uri.parent.parent.parent), name, Manifest)
    return None if stored is None else stored[0]


def _named(
    address: StoreURI | str | os.PathLike[str], folder: StoreURI
) -> tuple[StoreURI, Manifest | None]:
    """Return the folder and the manifest of a step; no manifest if the address is a folder's."""
    ref = parse_ref(address)
    if (ref.step, ref.run) == (None, folder):
        return folder, None
    try:
        run, info = resolve_checkpoint(address)
    except RunNotFoundError:
        if ref.step is None:
            raise
        return folder, None  # it may be called steps/N without being of a run
    return run.step_uri(info), run.manifest(info)


def _no_checkpoint(step_uri: StoreURI) -> StorageError:
    names = [entry.name for entry in open_files(step_uri).list()]
    if not names:
        return StepNotFoundError(
            "no such checkpoint",
            path=step_uri,
            expected="the folder of a committed checkpoint",
            found="nothing",
            next_step="List the run's steps.",
        )
    return NotACheckpointError(
        "no committed checkpoint",
        path=step_uri,
        expected=f"{COMMIT_FILE}, which a save writes last",
        found=", ".join(names[:8]) + (", …" if len(names) > 8 else ""),
        next_step="Name a step's folder; a step being saved can be read once it is committed.",
    )
