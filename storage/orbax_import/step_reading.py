"""One pass over a checkpoint of plain Orbax: every file's checksums, every chunk's digest.

Memory holds a few pieces of whole chunks at a time, whatever the size of the step. The job that
saved the step decided on the size of a chunk.
"""

import math
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.counts import count_text
from cairn.storage.arrays.boxes import READ_BYTES, Box, chunk_boxes
from cairn.storage.arrays.chunk_digests import FILE_PREFIX, ChunkDigests, DigestedBox
from cairn.storage.arrays.digests import digest_chunks, digest_text, total
from cairn.storage.arrays.ocdbt import is_data_file
from cairn.storage.arrays.orbax_tree import ARRAY_METADATA, parse_key_kinds
from cairn.storage.errors import CorruptionError, TreeMismatchError, UnsupportedFormatError
from cairn.storage.orbax_import.model_map import ModelLeaf, ModelMap
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.reader import CheckpointReader
from cairn.storage.runs.records.manifest import (
    LeafRecord,
    ObjectRecord,
    PlainStep,
    refuse_crowded_step,
)
from cairn.storage.runs.step_files import is_kept, removed_by_owner
from cairn.storage.store.file_checksums import read_files
from cairn.storage.store.files import FileEntry, Files
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.open_files import open_files
from cairn.storage.store.uri import StoreURI

__all__ = ["MODEL_ITEM", "StepRead", "is_as_mapped", "read_step", "with_model"]

MODEL_ITEM: Final = "model"

_KEY_TAGS: Final = {"threefry2x32": "fry", "unsafe_rbg": "urbg"}
"""JAX's names of PRNG implementations in dtypes, where Orbax records another."""

_THREADS: Final = max(2, min(4, os.cpu_count() or 1))
_PIECES_AT_ONCE: Final = 2 * _THREADS
_LARGE_BYTES: Final = 64 << 20
"""Size in bytes above which chunks are read one at a time."""


@dataclass(frozen=True)
class StepRead:
    """Records and digests from one read of a step.

    Attributes:
        leaves: records of every leaf of every tree.
        objects: records of every file in the owner's folder.
        digests: digests of the chunks, by the name of the file in which they will be stored.
        keys: PRNG implementation of leaves that are typed keys, by item and path.
        absent: leaves with absent chunks, which read as zeros, as "item/path".
        meta: content of the step's JSON items.
        modified_ns: latest modification of a file, in nanoseconds since the epoch; None if the
            store does not return it.
    """

    leaves: tuple[LeafRecord, ...]
    objects: tuple[ObjectRecord, ...]
    digests: dict[str, bytes]
    keys: dict[str, dict[str, str]]
    absent: tuple[str, ...]
    meta: dict[str, Any]
    modified_ns: int | None


def read_step(step: StoreURI, plain: PlainStep) -> StepRead:
    """Read every file and every array of a step; return records and digests.

    Args:
        step: folder of the step.
        plain: layout of the step.

    Raises:
        StepNotFoundError: the owner has removed the step meanwhile.
        CorruptionError: the step is damaged, or was changed while it was read.
        UnsupportedFormatError: two leaves share an array, or there are too many leaves or files.
        StoreUnavailableError: the store gives no answer.
    """
    files = open_files(step)
    listed = _owners(files)
    if not listed:
        raise removed_by_owner(step)
    refuse_crowded_step(0, len(listed), path=step)
    objects = _checksums(step, listed)
    reader = CheckpointReader.of_plain(step, plain)
    meta = reader.meta()
    leaves: list[LeafRecord] = []
    digests: dict[str, bytes] = {}
    keys: dict[str, dict[str, str]] = {}
    absent: list[str] = []
    for item in plain.trees:
        arrays = reader.arrays(item)
        assert arrays is not None, "its tree was seen there"
        _refuse_shared(arrays)
        reader.texts(item)
        kinds = _key_kinds(step, plain.trees[item], arrays)
        if kinds:
            keys[item] = kinds
        item_leaves, boxes = _leaves(item, arrays, kinds)
        leaves += item_leaves
        if arrays.tree.sparse:
            absent += [f"{item}/{path}" for path in boxes if not arrays.is_whole(path)]
        if boxes:
            digests[f"{item}/{FILE_PREFIX}0.json"] = ChunkDigests(boxes).to_bytes()
    refuse_crowded_step(len(leaves), len(listed), path=step)
    again = _owners(files)
    if again != listed:
        if not again:
            raise removed_by_owner(step)
        changed = sorted({entry.name for entry in {*again} ^ {*listed}})
        raise CorruptionError(
            "the step was changed while it was read",
            path=step,
            expected="files that stay as they are",
            found=f"{len(changed)} that did not: {', '.join(changed[:5])}",
            next_step="Adopt the folder into a new run once nothing is written or removed there.",
        )
    times = [entry.modified_ns for entry in listed if entry.modified_ns is not None]
    return StepRead(
        tuple(leaves),
        objects,
        digests,
        keys,
        tuple(absent),
        meta,
        max(times, default=None),
    )


def with_model(step: StoreURI, plain: PlainStep, model: ModelMap) -> PlainStep:
    """Return the step's layout with an additional item that has the model's leaves.

    Args:
        step: folder of the step.
        plain: layout without that item.
        model: map of the model's leaves.

    Raises:
        TreeMismatchError: the step's leaves do not fit the model; all mismatches are listed.
        StoreUnavailableError: the store gives no answer.
    """
    reader = CheckpointReader.of_plain(step, plain)
    item_arrays = {item: reader.arrays(item) for item in plain.trees}
    trees = {item: arrays for item, arrays in item_arrays.items() if arrays is not None}
    stored = {item: arrays.infos() for item, arrays in trees.items()}
    places = model.places(stored)
    items = sorted({leaf.item for leaf in places.values()})
    rest = [
        f"{MODEL_ITEM}/{path}: in the item {MODEL_ITEM!r}, and no leaf of the model"
        for path in sorted(stored.get(MODEL_ITEM, {}))
        if ModelLeaf(MODEL_ITEM, path) not in set(places.values())
    ]
    if len(items) != 1:
        rest.append(f"its leaves are in the items {', '.join(items)}, expected in one")
    if rest:
        raise TreeMismatchError(
            "no item of the model can be made",
            path=step,
            expected="all of its leaves in one item, alone if that is called 'model'",
            found=count_text(len(rest), "problem"),
            next_step="Correct the map.",
            problems=rest,
        )
    (item,) = items
    tree = trees[item].tree
    arrays = {name: tree.arrays[leaf.path] for name, leaf in places.items()}
    left = {*tree.arrays, *tree.strings} - {leaf.path for leaf in places.values()}
    folders = {name: folder for name, folder in plain.trees.items() if name != item or left}
    return plain.model_copy(
        update={
            "trees": {**folders, MODEL_ITEM: plain.trees[item]},
            "arrays": {MODEL_ITEM: arrays},
        }
    )


def is_as_mapped(step: StoreURI, plain: PlainStep, adopted: PlainStep, model: ModelMap) -> bool:
    """Return True if an imported step still has the model's leaves where the rules map them.

    No values are read.

    Args:
        step: folder of the step.
        plain: its present layout, without the model.
        adopted: its layout when it was imported.
        model: map of the model's leaves.

    Raises:
        CorruptionError: Orbax's metadata of a tree can't be read.
        StoreUnavailableError: the store gives no answer.
    """
    reader = CheckpointReader.of_plain(step, plain)
    mapped = set()
    for item in plain.trees:
        arrays = reader.arrays(item)
        assert arrays is not None, "its tree was seen there"
        stored = arrays.tree.arrays
        named = model.names(ModelLeaf(item, path) for path in stored)
        mapped |= {(name, stored[leaf.path]) for leaf, name in named.items() if name is not None}
    return mapped == {*adopted.arrays.get(MODEL_ITEM, {}).items()}


def _owners(files: Files) -> list[FileEntry]:
    """Return all files of the owner; digests that a fork of an imported step added are left out."""
    return [entry for entry in files.walk() if not is_kept(entry.name)]


def _refuse_shared(arrays: ItemArrays) -> None:
    """Raise UnsupportedFormatError if leaves share an array: Orbax kept the values of only one."""
    names = arrays.tree.arrays
    counts = Counter(names.values())
    shared = sorted(path for path, name in names.items() if counts[name] > 1)
    if shared:
        raise UnsupportedFormatError(
            "leaves that are one array",
            path=arrays.uri,
            expected="an array for each leaf",
            found=f"one of the same name for {', '.join(shared[:6])}",
            next_step="Save the tree again, with keys that differ when they are joined by dots.",
        )


def _checksums(step: StoreURI, listed: list[FileEntry]) -> tuple[ObjectRecord, ...]:
    """Return a record of each file; data files are not read if the store returns checksums."""
    largest_first = sorted(listed, key=lambda entry: (-entry.size, entry.name))
    to_read = [
        entry.name
        for entry in largest_first
        if entry.crc32c is None or not is_data_file(entry.name)
    ]
    read = {checksum.name: checksum for checksum in read_files(step, to_read)}
    records = []
    for entry in listed:
        checksum = read.get(entry.name)
        crc32c = (checksum and checksum.crc32c) or entry.crc32c
        assert crc32c is not None  # from the store or a read
        records.append(
            ObjectRecord(
                name=entry.name,
                size=entry.size,
                crc32c=crc32c,
                content=checksum and checksum.content,
                modified_ns=entry.modified_ns,
            )
        )
    return tuple(records)


class _Leaf(NamedTuple):
    """Leaf that is being read.

    Attributes:
        info: description of the leaf.
        digests: digests of its chunks, by their index in the grid of chunks.
        boxes: the boxes that are read one at a time.
    """

    info: LeafInfo
    digests: np.ndarray[Any, np.dtype[np.uint64]]
    boxes: Iterator[Box]

    @property
    def chunk_bytes(self) -> int:
        """Size of a whole chunk in bytes."""
        return math.prod(self.info.chunks or ()) * self.info.dtype.itemsize


def _key_kinds(step: StoreURI, folder: str, arrays: ItemArrays) -> dict[str, str]:
    """Return the PRNG implementation of each leaf that is a typed key, by path."""
    files = open_files(step)
    inside = f"{folder}/{ARRAY_METADATA}" if folder else ARRAY_METADATA
    names = [f"{inside}/{entry.name}" for entry in files.list(inside) if not entry.is_dir]
    kinds: dict[str, str] = {}
    for name, content in ObjectStore.open(step).read_many(names).items():
        if content is not None:
            kinds |= parse_key_kinds(content.value, path=step / name)
    return {path: kinds[name] for path, name in arrays.tree.arrays.items() if name in kinds}


def _leaves(
    item: str, arrays: ItemArrays, kinds: Mapping[str, str]
) -> tuple[list[LeafRecord], dict[str, list[DigestedBox]]]:
    """Return records of a tree's leaves, and the digests of their chunks by path."""
    infos = arrays.infos()
    stored = []
    for info in infos.values():
        if info.chunks is None or not info.nbytes:
            continue
        counts = [-(-size // chunk) for size, chunk in zip(info.shape, info.chunks, strict=True)]
        window = tuple(slice(0, size) for size in info.shape)
        limit = max(1, READ_BYTES // max(1, info.dtype.itemsize))
        leaf_boxes = chunk_boxes(window, info.chunks, limit) if info.shape else iter([()])
        stored.append(_Leaf(info, np.zeros(counts, np.uint64), leaf_boxes))
    with ThreadPoolExecutor(_THREADS, "cairn-adopt") as pool:
        under_way: deque[Future[None]] = deque()
        try:
            for leaf in stored:
                for box in leaf.boxes:
                    most = _PIECES_AT_ONCE if leaf.chunk_bytes <= _LARGE_BYTES else 1
                    while len(under_way) >= most:
                        under_way.popleft().result()
                    under_way.append(pool.submit(_digest, arrays, leaf, box))
            while under_way:
                under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
    by_path = {leaf.info.path: leaf for leaf in stored}
    records = []
    for path, info in infos.items():
        filled, kind = by_path.get(path), kinds.get(path)
        records.append(
            LeafRecord(
                item=item,
                path=path,
                shape=info.shape if kind is None else info.shape[:-1],  # without the words' axis
                dtype=info.dtype.name if kind is None else f"key<{_KEY_TAGS.get(kind, kind)}>",
                chunks=None if filled is None else info.chunks,
                digest=None if filled is None else digest_text(total(filled.digests)),
            )
        )
    boxes = {
        path: [DigestedBox((0,) * len(leaf.info.shape), leaf.digests.shape, leaf.digests)]
        for path, leaf in by_path.items()
    }
    return records, boxes


def _digest(arrays: ItemArrays, leaf: _Leaf, box: Box) -> None:
    """Read a box of whole chunks, and store their digests in `leaf`."""
    chunks = leaf.info.chunks or ()
    reads: Any = arrays.array(leaf.info.path)[box]
    values = arrays.wait(reads.read(order="C"), leaf.info.path)
    digest = digest_chunks(values, [part.start for part in box], chunks)
    first = [part.start // chunk for part, chunk in zip(box, chunks, strict=True)]
    place = tuple(slice(a, a + n) for a, n in zip(first, digest.shape, strict=True))
    leaf.digests[place] = digest
