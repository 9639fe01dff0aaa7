"""Write an item of held arrays as an Orbax tree: Orbax's handler, our bytes. Imports JAX and Orbax.

Orbax makes the step's folder and commits it; between, this writes the item's files straight from
memory. With several processes each writes a database of its own parts, which TensorStore then
merges, as it does for Orbax's own handler. Plain Orbax reads the result with that handler, under
whose name it is recorded. See ADR 0009.
"""

import asyncio
import os
import secrets
import time
import weakref
from collections.abc import Awaitable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import jax
import tensorstore as ts
from orbax.checkpoint import v1 as ocp

from cairn.storage.arrays import (
    FILE_PREFIX,
    MANIFEST_FILE,
    MAX_INLINE_BYTES,
    MAX_NODE_BYTES,
    NODE_FOLDER,
    ChunkDigests,
    Compression,
    DigestedBox,
    StoredFile,
    ValueRef,
    leaf_node,
    manifest,
    open_sink,
    write_value_files,
)
from cairn.storage.errors import UnsupportedFormatError, translate
from cairn.storage.store import ObjectStore, StoreURI, parse_uri, patient_context
from cairn.storage.training import item_files, processes
from cairn.storage.training.held_arrays import HeldArray
from cairn.storage.training.leaf_forms import LeafForm
from cairn.storage.training.unchanged import SavedItem, SavedShard, Unchanged

__all__ = ["HeldItem", "HeldTree", "HeldTreeHandler", "WrittenItem", "merge_databases"]

_PROCESS_FOLDER: Final = "ocdbt.process_{}"


class WrittenItem:
    """What came of writing an item; filled in when it is durable.

    Attributes:
        files: size and checksum of the value files that this process wrote, named from the item.
        digests: of the chunks that this process wrote.
        database: the folder in the item's that this process wrote into; None for the item's own.
        saved: what of it the next save may use, its folder being that of the save.
    """

    def __init__(self) -> None:
        self.files: list[StoredFile] = []
        self.digests = ChunkDigests()
        self.database: str | None = None
        self.saved: SavedItem | None = None


class HeldItem(NamedTuple):
    """One tree as it is written.

    Attributes:
        held: by path, this process's parts of the leaves that have elements; emptied when they
            begin to be written, so that memory is freed as they are.
        forms: as in `StoredItem`.
        written: filled in once the item is durable.
        unchanged: what is known of the saves before.
        same: paths of the leaves that are known to be what the save before stored.
        leaves: the immutable arrays among those that were given, by path.
        compression: of the stored chunks.
    """

    held: dict[str, HeldArray]
    forms: Mapping[str, LeafForm]
    written: WrittenItem
    unchanged: Unchanged
    same: frozenset[str]
    leaves: Mapping[str, weakref.ref[Any]]
    compression: Compression | None = None

    def durable(self, folder: StoreURI) -> None:
        """The step is: the next save need not write again what stays as it is.

        Args:
            folder: the item's, in the step.
        """
        saved = self.written.saved
        if saved is not None:
            place = folder if self.written.database is None else folder / self.written.database
            self.unchanged.remember(saved._replace(folder=place), self.leaves)


class HeldTree:
    """An item to be written, once."""

    def __init__(self, item: HeldItem, *, save: str) -> None:
        """Of this item.

        Args:
            item: it has at least one array.
            save: under what the processes tell each other of failures, see `processes.meet`.
        """
        self.item = item
        self.save = save

    def take(self) -> dict[str, HeldArray]:
        """The arrays, of which the item lets go."""
        held = dict(self.item.held)
        self.item.held.clear()
        if not held:
            raise RuntimeError("a held tree is written once")
        return held


class HeldTreeHandler:
    """What Orbax calls to save a `HeldTree`. Loading is Orbax's own handler's."""

    def __init__(self, *, context: Any = None) -> None:
        """As Orbax makes its handlers."""
        del context

    def is_handleable(self, checkpointable: Any) -> bool:
        """True for what this saves."""
        return isinstance(checkpointable, HeldTree)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool:
        """False: this loads nothing."""
        del abstract_checkpointable
        return False

    async def save(self, directory: Any, checkpointable: HeldTree) -> Awaitable[None]:
        """Give what writes the item once Orbax has made the folder."""
        return self._save(directory, checkpointable)

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Any:
        """Never called: see `is_abstract_handleable`.

        Raises:
            UnsupportedFormatError: always.
        """
        raise UnsupportedFormatError(
            "this handler only saves",
            path=directory,
            expected="Orbax's PyTreeHandler",
            found=type(self).__name__,
            next_step="Load without registering a handler.",
        )

    async def metadata(self, directory: Any) -> Any:
        """Never called.

        Raises:
            UnsupportedFormatError: always.
        """
        return await self.load(directory)

    async def _save(self, directory: Any, tree: HeldTree) -> None:
        path = await directory.await_creation()  # in process 0, which makes the folder
        await asyncio.to_thread(processes.meet, tree.save, f"{path.name}/made")
        await asyncio.to_thread(_write, parse_uri(str(path)), tree)
        if jax.process_count() == 1:
            return
        await asyncio.to_thread(processes.meet, tree.save, f"{path.name}/written")
        if jax.process_index() == 0:
            await asyncio.to_thread(merge_databases, parse_uri(str(path)), jax.process_count())


# Orbax records a handler by its module and name, and looks them up when it loads.
HeldTreeHandler.__module__ = ocp.handlers.PyTreeHandler.__module__
HeldTreeHandler.__qualname__ = ocp.handlers.PyTreeHandler.__qualname__


def _write(folder: StoreURI, tree: HeldTree) -> None:
    """Write this process's files of the item."""
    process = jax.process_index()
    item, held = tree.item, tree.take()
    written = item.written
    shards = list(item_files.shards(held, item.forms, item.compression))
    entries: dict[bytes, bytes | ValueRef] = dict(item_files.index_entries(held, item.compression))
    files = dict([item_files.layouts_file(held, process)])
    if process == 0:
        files |= item_files.description(held)
    layouts = {
        path: (array.shape, array.dtype.name, array.cut, item.compression)
        for path, array in held.items()
    }
    del held
    database = folder
    if jax.process_count() > 1:
        written.database = _PROCESS_FOLDER.format(process)
        database = folder / written.database
    reused = item.unchanged.reuse(shards, layouts, item.same, database)
    del shards
    sink = open_sink(database)
    try:
        values = write_value_files(sink, _drained(reused.rest))
    finally:
        sink.close()
    stored = dict(reused.shards)
    for file in values:
        for key, (path, box) in file.boxes.items():
            stored[key] = SavedShard(path, file.refs[key], box)
    records = {record.name: record for record in (*reused.files, *(one.record for one in values))}
    boxes: dict[str, list[DigestedBox]] = {}
    for key, shard in stored.items():
        entries[key] = shard.ref
        boxes.setdefault(shard.path, []).append(shard.box)
    prefix = f"{written.database}/" if written.database else ""
    written.digests = ChunkDigests(boxes)
    written.saved = SavedItem(database, layouts, stored, records)
    written.files = [record._replace(name=f"{prefix}{name}") for name, record in records.items()]
    node = leaf_node(entries)
    node_file = f"{NODE_FOLDER}/{secrets.token_hex(16)}"
    files[f"{prefix}{node_file}"] = node.data
    files[f"{prefix}{MANIFEST_FILE}"] = manifest(node, node_file, time_ns=time.time_ns())
    files[f"{FILE_PREFIX}{process}.json"] = written.digests.to_bytes()
    _write_files(folder, files)


def merge_databases(folder: StoreURI, count: int) -> None:
    """Make one database of an item's `count` databases: its tree names their value files.

    As Orbax does for its own handler, with the nodes apart from the values.

    Raises:
        StoreUnavailableError: the store gives no answer.
    """
    context = patient_context()
    spec = {
        "driver": "ocdbt",
        "base": folder.kvstore_spec(),
        "config": {
            "max_inline_value_bytes": MAX_INLINE_BYTES,
            "max_decoded_node_bytes": MAX_NODE_BYTES,
            "manifest_kind": "single",
        },
        "assume_config": True,  # nobody else writes here
        "btree_node_data_prefix": f"{NODE_FOLDER}/",
        "version_tree_node_data_prefix": f"{NODE_FOLDER}/",
    }
    try:
        whole = ts.KvStore.open(spec, context=context).result()
        parts = [
            ts.KvStore.open(
                {"driver": "ocdbt", "base": (folder / _PROCESS_FOLDER.format(n)).kvstore_spec()},
                context=context,
            )
            for n in range(count)
        ]
        transaction = ts.Transaction(atomic=True)
        merged = whole.with_transaction(transaction)
        for copied in [part.result().experimental_copy_range_to(merged) for part in parts]:
            copied.result()
        transaction.commit_sync()
    except (ValueError, OSError) as exc:
        raise translate(exc, path=folder) from exc


def _drained(shards: list[Any]) -> Any:
    """The shards, each forgotten here as it is handed out."""
    shards.reverse()
    while shards:
        yield shards.pop()


def _write_files(folder: StoreURI, files: Mapping[str, bytes]) -> None:
    """Write small files that nobody else writes. On a disk they are synced with the step."""
    if folder.scheme != "file":
        objects = ObjectStore(folder, patient=True)
        with ThreadPoolExecutor(min(8, len(files))) as pool:
            for done in [pool.submit(objects.write, *item) for item in files.items()]:
                done.result()
        return
    for name, data in files.items():
        path = os.path.join(folder.local_path, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(data)
