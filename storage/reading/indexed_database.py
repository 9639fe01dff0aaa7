"""OCDBT database for TensorStore with one leaf, built from the step's index.

Values are read from the store; the tree that leads to them is built in memory. So only values are
read from Orbax's files, and the index alone says where they are.
"""

import itertools
from collections.abc import Mapping
from typing import Any, Final

import tensorstore as ts

from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.ocdbt import MANIFEST_FILE, NODE_FOLDER, ValueRef, leaf_node, manifest
from cairn.storage.arrays.orbax_tree import StoredForm
from cairn.storage.arrays.zarr_arrays import stored_layout, zarr_description
from cairn.storage.runs.records.manifest import LeafRecord
from cairn.storage.runs.records.step_index import ItemPlaces

__all__ = ["MEMORY", "indexed_database", "leaf_entries"]

MEMORY: Final = "memory_key_value_store"
"""Resource that the TensorStore context must not share: it holds the databases built here."""

# Each database gets a folder of its own in the context's memory, since many threads open leaves.
_numbers: Final = itertools.count()


def indexed_database(
    values: Mapping[str, Any],
    name: str,
    record: LeafRecord,
    form: StoredForm | None,
    places: ItemPlaces,
    context: ts.Context,
) -> dict[str, Any]:
    """Return the spec of a new database's base folder, for TensorStore's OCDBT driver.

    Args:
        values: spec of the item's folder.
        name: the array's name.
        record: record of the leaf, which must have elements.
        form: stored form of the leaf; None: it is stored as it is.
        places: locations of the item's values.
        context: TensorStore context that has `MEMORY`.
    """
    entries = leaf_entries(name, record, form, places)
    node = leaf_node(entries)
    node_file = f"{NODE_FOLDER}/0"
    folder = f"{next(_numbers)}/"
    memory = {"driver": "memory", MEMORY: MEMORY}
    kept = ts.KvStore.open({**memory, "path": folder}, context=context).result()
    kept[node_file] = node.data
    kept[MANIFEST_FILE] = manifest(node, node_file, time_ns=0)
    return {
        # The last matching layer counts: manifest and tree come from memory, all else from the
        # item.
        "driver": "kvstack",
        "layers": [
            {"base": dict(values)},
            {"exact": MANIFEST_FILE, "base": {**memory, "path": f"{folder}{MANIFEST_FILE}"}},
            {"prefix": f"{NODE_FOLDER}/", "base": {**memory, "path": f"{folder}{NODE_FOLDER}/"}},
        ],
    }


def leaf_entries(
    name: str, record: LeafRecord, form: StoredForm | None, places: ItemPlaces
) -> dict[bytes, bytes | ValueRef]:
    """Return a database's entries for one array: its description, and locations of its shards.

    Args:
        name: the array's name.
        record: record of the leaf, which must have elements.
        form: stored form of the leaf; None: it is stored as it is.
        places: locations of the item's values.
    """
    assert record.shards is not None
    assert record.chunks is not None
    cut = ChunkShapes(record.shards, record.chunks)
    layout = stored_layout(record.shape, record.dtype, cut, form)
    entries: dict[bytes, bytes | ValueRef] = {
        f"{name}/zarr.json".encode(): zarr_description(layout, record.compression)
    }
    for cell, ref in places.refs(record.path).items():
        entries["/".join([name, "c", *map(str, cell)]).encode()] = ref
    return entries
