"""Writer of a tree as a checkpoint of plain Orbax, without Orbax: arrays come shard by shard.

The step's folder has another name until it is complete and durable. Source: orbax.checkpoint 0.12,
`_src/metadata/step_metadata_serialization.py` and `_src/path/atomicity.py`.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from cairn.storage.arrays.boxes import Box
from cairn.storage.arrays.chunks import ChunkShapes, inner_chunk_shape
from cairn.storage.arrays.data_file_writers import DataFileWriter, open_data_file_writer
from cairn.storage.arrays.data_files import ShardToWrite, WrittenFile, write_data_files
from cairn.storage.arrays.ocdbt import MANIFEST_FILE, NODE_FOLDER, ValueRef, leaf_node, manifest
from cairn.storage.arrays.orbax_tree import (
    STEP_METADATA,
    TREE_METADATA,
    array_name,
    tree_metadata,
)
from cairn.storage.arrays.zarr_arrays import StoredLayout, zarr_description
from cairn.storage.errors import StepExistsError, translate_error
from cairn.storage.store.disk.directory_entries import fsync_path
from cairn.storage.store.uri import parse_uri

__all__ = ["LeafToWrite", "write_plain_step"]

_TEMPORARY: Final = ".orbax-checkpoint-tmp"
_GROUP_BYTES: Final = 64 << 20
"""Bytes of shards that are written together, or one shard; as many are read meanwhile."""

_HANDLER: Final = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"


class LeafToWrite(NamedTuple):
    """Leaf of a tree to write.

    Attributes:
        shape: shape of the leaf; no axis has length 0.
        dtype: its dtype.
        shard: shape of the shards, each of which is in memory whole; divides `shape`.
        read: function from a box of one shard to its values.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    shard: tuple[int, ...]
    read: Callable[[Box], np.ndarray[Any, Any]]


def write_plain_step(folder: Path, step: int, item: str, leaves: Mapping[str, LeafToWrite]) -> Path:
    """Write a step with one item, as plain Orbax would; return the item's folder.

    Some 64 MiB of shards, or one shard, are written while as many are read. The step appears whole:
    it is renamed when it is durable.

    Args:
        folder: folder of steps on a local disk; created if needed.
        step: number of the step.
        item: name of the item.
        leaves: path -> leaf.

    Raises:
        StepExistsError: the step exists.
        StoreFullError: the disk is full.
        StoreUnavailableError: the disk failed.
    """
    final = folder / str(step)
    if final.exists():
        raise StepExistsError(
            "the step exists",
            path=final,
            expected="a new step",
            found="a folder",
            next_step="Name another folder, or remove it.",
        )
    temporary = folder / f"{step}{_TEMPORARY}-{secrets.token_hex(4)}"
    database = temporary / item
    try:
        database.mkdir(parents=True)
        cuts = {
            path: ChunkShapes(
                leaf.shard, inner_chunk_shape(leaf.shape, leaf.shard, leaf.dtype.itemsize)
            )
            for path, leaf in leaves.items()
        }
        entries: dict[bytes, bytes | ValueRef] = {
            f"{array_name(path)}/zarr.json".encode(): zarr_description(
                StoredLayout(leaf.shape, leaf.dtype.name, cuts[path]), None
            )
            for path, leaf in leaves.items()
        }
        sink = open_data_file_writer(parse_uri(str(database)))
        try:
            entries |= _write_values(sink, _shards(leaves, cuts))
        finally:
            sink.close()
        node = leaf_node(entries)
        node_file = f"{NODE_FOLDER}/{secrets.token_hex(16)}"
        now = time.time_ns()
        _write(database / node_file, node.data)
        _write(database / MANIFEST_FILE, manifest(node, node_file, time_ns=now))
        _write(
            database / TREE_METADATA,
            tree_metadata({path: leaf.shard for path, leaf in leaves.items()}),
        )
        described = {
            "item_handlers": {item: _HANDLER},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": now,
            "commit_timestamp_nsecs": now,
            "custom_metadata": {},
        }
        _write(temporary / STEP_METADATA, json.dumps(described).encode())
        for inner, _, _ in os.walk(temporary, topdown=False):
            fsync_path(inner)
        temporary.rename(final)
        fsync_path(str(folder))
    except OSError as exc:
        shutil.rmtree(temporary, ignore_errors=True)
        raise translate_error(exc, path=parse_uri(str(folder))) from exc
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final / item


def _write_values(sink: DataFileWriter, shards: Iterator[ShardToWrite]) -> dict[bytes, ValueRef]:
    """Write shards, and return where they lie; some are read while those before are written."""
    refs: dict[bytes, ValueRef] = {}
    writing: deque[Future[list[WrittenFile]]] = deque()
    with ThreadPoolExecutor(1, "cairn-groups") as pool:
        while group := _next_group(shards):
            if writing:
                refs |= _places(writing.popleft().result())
            writing.append(pool.submit(write_data_files, sink, group))
        for last in writing:
            refs |= _places(last.result())
    return refs


def _next_group(shards: Iterator[ShardToWrite]) -> list[ShardToWrite]:
    group: list[ShardToWrite] = []
    while sum(shard.values.nbytes for shard in group) < _GROUP_BYTES:
        shard = next(shards, None)
        if shard is None:
            break
        group.append(shard)
    return group


def _places(files: Iterable[WrittenFile]) -> dict[bytes, ValueRef]:
    return {key: place for file in files for key, place in file.refs.items()}


def _shards(
    leaves: Mapping[str, LeafToWrite], cuts: Mapping[str, ChunkShapes]
) -> Iterator[ShardToWrite]:
    """Yield the shards of all leaves; each is read when it is yielded."""
    for path, leaf in leaves.items():
        starts = (range(0, n, step) for n, step in zip(leaf.shape, leaf.shard, strict=True))
        for origin in itertools.product(*starts):
            box = tuple(slice(at, at + n) for at, n in zip(origin, leaf.shard, strict=True))
            index = (str(at // n) for at, n in zip(origin, leaf.shard, strict=True))
            yield ShardToWrite(
                key="/".join([array_name(path), "c", *index]).encode(),
                path=path,
                values=leaf.read(box),
                origin=origin,
                chunk=cuts[path].chunk,
            )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    fsync_path(str(path))
