"""Writer of a tree of host arrays, in the form that plain Orbax reads.

Each process writes data files with its own boxes, straight from memory. Process 0 also writes the
small files that make the folder an Orbax tree, which depend only on shapes, dtypes and shardings.
From the records of all processes it writes one database index. Imports JAX. See ADR 0009 and 18.

Source of the small files: orbax.checkpoint 0.12, `_src/metadata/{tree,sharding,
array_metadata_store}.py` and `_src/serialization/tensorstore_utils.py`, and files written by them.
"""

import base64
import functools
import itertools
import json
import math
import os
import secrets
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import jax
import numpy as np

from cairn.state.checkpointing.device_digests import DeviceDigests, DeviceShard, compile_digests
from cairn.state.checkpointing.saves.dedup import Dedup, DedupFile, LeafLayout, WrittenTree
from cairn.state.checkpointing.saves.host_arrays import DeferredLeaf, HostArray
from cairn.state.checkpointing.saves.process_records import ProcessRecord, WrittenShard
from cairn.state.checkpointing.saves.staging import Staging
from cairn.storage.arrays.data_file_writers import UploadMemory, open_data_file_writer
from cairn.storage.arrays.data_files import (
    Compression,
    ShardToWrite,
    StoredFile,
    stored_file,
    write_data_files,
)
from cairn.storage.arrays.four_bits import packed_axis
from cairn.storage.arrays.ocdbt import MANIFEST_FILE, NODE_FOLDER, ValueRef, leaf_node, manifest
from cairn.storage.arrays.orbax_tree import TREE_METADATA, StoredForm, array_name, tree_metadata
from cairn.storage.arrays.zarr_arrays import StoredLayout, zarr_description
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.uri import StoreURI

__all__ = [
    "HostTree",
    "complete_tree",
    "index_entries",
    "shards_of",
    "write_files",
    "write_tree",
]

_PROCESS_FOLDER: Final = "ocdbt.process_{}"


class HostTree(NamedTuple):
    """Tree on the host, ready to be written.

    Attributes:
        name: the item's name.
        arrays: host arrays of the leaves that have elements, by path. The writer empties this when
            it starts, so that memory is freed as it writes.
        forms: stored forms of the leaves that are converted, by path.
        dedup: the item's deduplication.
        same: paths of the leaves whose values certainly equal those of the last step.
        leaves: references to the caller's immutable arrays, by path.
        deferred: leaves to link, by path; their arrays have no boxes, and are copied only if they
            can't be linked. Emptied like `arrays`.
        compression: compression of the stored chunks; None without.
        staging: source of the boxes that come in waves, which `arrays` lack; None if none do.
        uploads: memory for uploads to an object store; None for no limit.
        wave_bytes: maximum bytes of deferred leaves that are copied together; a larger leaf is
            copied alone.
        digests: device digests of leaves.
        places: device, shape and dtype of the shards of leaves that later saves may digest, by
            path.
    """

    name: str
    arrays: dict[str, HostArray]
    forms: Mapping[str, StoredForm]
    dedup: Dedup
    same: frozenset[str]
    leaves: Mapping[str, weakref.ref[Any]]
    deferred: dict[str, DeferredLeaf]
    compression: Compression | None = None
    staging: Staging | None = None
    uploads: UploadMemory | None = None
    wave_bytes: float = math.inf
    digests: DeviceDigests = DeviceDigests()
    places: Mapping[str, Sequence[DeviceShard]] = MappingProxyType({})

    def remember(self, written: WrittenTree, folder: StoreURI, step: tuple[int, int]) -> None:
        """Remember the tree of a durable step, so that the next save can link unchanged leaves.

        Args:
            written: what this process wrote of the tree.
            folder: the tree's folder in the step.
            step: (step, attempt) of the step.
        """
        try:
            digests = self.digests.values()
        except jax.errors.JaxRuntimeError:  # the step is durable even if the device failed since
            digests = {}
        written = written._replace(folder=_database(folder))
        self.dedup.remember(written, self.leaves, step, digests)
        watched = self.dedup.watched
        compile_digests({path: parts for path, parts in self.places.items() if path in watched})


def write_tree(folder: StoreURI, tree: HostTree) -> WrittenTree:
    """Write this process's files of a tree, dropping each array once it is written.

    Args:
        folder: the tree's folder in a step that is not committed yet.
        tree: the tree, which must have an array.

    Raises:
        OSError: the disk is full, or failed.
        StoreUnavailableError: the store does not respond.
    """
    try:
        return _write_tree(folder, tree)
    except BaseException as exc:
        if tree.staging is not None:  # else threads would wait forever for further waves
            tree.staging.end(exc)
        raise


def _database(folder: StoreURI) -> StoreURI:
    """Return the folder of this process's database: in a job of one process, the tree's folder."""
    alone = jax.process_count() == 1
    return folder if alone else folder / _PROCESS_FOLDER.format(jax.process_index())


def _write_tree(folder: StoreURI, tree: HostTree) -> WrittenTree:
    arrays = dict(tree.arrays)
    tree.arrays.clear()
    descriptions = index_entries(arrays, tree.compression)
    files = _description(arrays) if jax.process_index() == 0 else {}
    tree_bytes = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays.values())
    layouts = {
        path: LeafLayout(
            array.shape, array.dtype.name, array.cut, tree.compression, tree.forms.get(path)
        )
        for path, array in arrays.items()
    }
    outlines = {path: array._replace(boxes=()) for path, array in arrays.items()}
    database = _database(folder)
    stored: dict[bytes, WrittenShard] = {}
    data_files: dict[str, DedupFile] = {}
    with ThreadPoolExecutor(1, "cairn-small") as pool:  # in parallel with the values
        describing = pool.submit(write_files, folder, files)
        sink = open_data_file_writer(database, item_bytes=tree_bytes, uploads=tree.uploads)
        try:
            for shards in _waves(arrays, outlines, tree):
                reused = tree.dedup.reuse(
                    _drained(shards), layouts, tree.same, database, linked=data_files
                )
                stored |= reused.shards
                data_files |= reused.files
                for rest in _with_values(reused.rest, outlines, tree):
                    written = write_data_files(sink, _drained(rest))
                    stored |= {
                        key: WrittenShard(
                            path,
                            file.refs[key],
                            box.origin,
                            box.digests,
                            file.fingerprints.get(key) or reused.fingerprints.get(key),
                        )
                        for file in written
                        for key, (path, box) in file.boxes.items()
                    }
                    data_files |= tree.dedup.written(database, written)
                del reused, shards
        finally:
            sink.close()
        small = describing.result()
    records = [file.record for file in data_files.values()]
    shards_in_tree = stored
    if database != folder:  # names in the record are relative to the tree's folder
        records = [file._replace(name=f"{database.name}/{file.name}") for file in records]
        shards_in_tree = {
            key: shard._replace(ref=shard.ref._replace(file=f"{database.name}/{shard.ref.file}"))
            for key, shard in stored.items()
        }
    record = ProcessRecord((*records, *small), shards_in_tree)
    return WrittenTree(database, layouts, stored, data_files, (record,), descriptions)


def _waves(
    arrays: dict[str, HostArray], outlines: Mapping[str, HostArray], tree: HostTree
) -> Iterator[list[ShardToWrite]]:
    """Yield the shards of each wave in a new list, to which nothing else refers.

    Args:
        arrays: the tree's host arrays, by path; emptied.
        outlines: the same arrays without their boxes.
        tree: the tree, with its waves and deferred leaves.
    """
    for path, leaf in tree.deferred.items():
        arrays[path] = outlines[path]._replace(boxes=leaf.placeholders())
    first = list(shards_of(arrays, tree.forms, tree.compression))
    arrays.clear()
    if first or tree.staging is None:
        yield first
    del first
    if tree.staging is not None:
        for wave in tree.staging.waves_of(tree.name):
            staged = {path: outlines[path]._replace(boxes=wave[path]) for path in wave}
            shards = list(shards_of(staged, tree.forms, tree.compression))
            del wave, staged
            yield shards


def _with_values(
    rest: list[ShardToWrite], outlines: Mapping[str, HostArray], tree: HostTree
) -> Iterator[list[ShardToWrite]]:
    """Yield groups of shards to write: first those on the host, then copies of deferred leaves.

    Deferred leaves, all of which are in the first wave, are copied in groups of at most
    `wave_bytes`; a larger leaf is copied alone.

    Args:
        rest: shards that could not be linked; emptied.
        outlines: the tree's arrays without their boxes, by path.
        tree: the tree; its deferred leaves are removed, so that their memory can be freed.

    Raises:
        SaveError: a deferred leaf was deleted or donated in the meantime.
    """
    left: dict[str, list[ShardToWrite]] = {}
    here: list[ShardToWrite] = []
    for shard in _drained(rest):
        (left.setdefault(shard.path, []) if shard.path in tree.deferred else here).append(shard)
    deferred = {path: tree.deferred[path] for path in left}
    tree.deferred.clear()
    yield here
    while deferred:
        group = [next(iter(deferred))]
        nbytes = deferred[group[0]].nbytes
        for path, leaf in deferred.items():
            if path not in group and nbytes + leaf.nbytes <= tree.wave_bytes:
                group.append(path)
                nbytes += leaf.nbytes
        arrays = {path: outlines[path]._replace(boxes=deferred.pop(path).copy()) for path in group}
        copied = shards_of(arrays, tree.forms, tree.compression)
        values = {shard.key: shard.values for shard in copied}
        shards = [shard for path in group for shard in left.pop(path)]
        del arrays, copied
        yield [shard._replace(values=values.pop(shard.key)) for shard in shards]


def complete_tree(
    folder: StoreURI, written: WrittenTree, others: Sequence[ProcessRecord]
) -> WrittenTree:
    """Write one database index of what all processes wrote of a tree. Process 0 calls this.

    Args:
        folder: the tree's folder.
        written: what process 0 wrote.
        others: records of what each other process wrote.

    Returns:
        `written` with the records of all processes.

    Raises:
        StoreUnavailableError: the store does not respond.
    """
    records = [*written.records, *others]
    entries: dict[bytes, bytes | ValueRef] = dict(written.descriptions)
    for record in records:
        entries |= {key: shard.ref for key, shard in record.shards.items()}
    node = leaf_node(entries)
    node_file = f"{NODE_FOLDER}/{secrets.token_hex(16)}"
    top = manifest(node, node_file, time_ns=time.time_ns())
    files = write_files(folder, {node_file: node.data, MANIFEST_FILE: top})
    return written._replace(records=(*records, ProcessRecord(files, {})))


def _drained(shards: list[Any]) -> Any:
    """Yield the shards in order, removing each from the list, so that its memory can be freed."""
    shards.reverse()
    while shards:
        yield shards.pop()


def write_files(folder: StoreURI, files: Mapping[str, bytes]) -> list[StoredFile]:
    """Write small files, by name, which must not exist. On a disk, the caller must sync them.

    Returns:
        The files' records, computed from the bytes in memory.
    """
    if files and folder.scheme != "file":
        objects = ObjectStore(folder, patient=True)
        pool = ThreadPoolExecutor(min(8, len(files)))
        try:
            for done in [pool.submit(objects.write, *item) for item in files.items()]:
                done.result()
        finally:
            pool.shutdown(cancel_futures=True)
    else:
        for name, data in files.items():
            path = os.path.join(folder.local_path, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(data)
    return [stored_file(name, data) for name, data in files.items()]


_SHARDINGS: Final = "_sharding"
_LAYOUTS: Final = "array_metadatas/process_0"
"""Orbax writes one such file per process and reads all there are. Ours would be equal, so there is
one."""


def _description(arrays: Mapping[str, HostArray]) -> dict[str, bytes]:
    """Return the files, by name, that describe the item as a whole. Process 0 writes them."""
    shardings = {
        base64.urlsafe_b64encode(array_name(path).encode()).decode(): text
        for path, array in arrays.items()
        if (text := _sharding_text(array.sharding)) is not None
    }
    layouts = [
        {
            "array_metadata": {
                "param_name": array_name(path),
                "write_shape": list(array.cut.shard),
                "chunk_shape": list(array.cut.chunk),
                "ext_metadata": array.key_impl and {"random_key_impl": array.key_impl},
            }
        }
        for path, array in arrays.items()
        if array.sharding is not None
    ]
    files = {
        TREE_METADATA: tree_metadata(
            {
                path: None if array.sharding is None else array.cut.shard
                for path, array in arrays.items()
            }
        ),
        _LAYOUTS: json.dumps({"array_metadatas": layouts}).encode(),
    }
    if shardings:
        files[_SHARDINGS] = json.dumps(shardings, separators=(",", ":")).encode()
    return files


def index_entries(
    arrays: Mapping[str, HostArray], compression: Compression | None = None
) -> dict[bytes, bytes]:
    """Return the zarr description of each array, by its key in the database."""
    return {
        f"{array_name(path)}/zarr.json".encode(): zarr_description(
            StoredLayout(array.shape, array.dtype.name, array.cut), compression
        )
        for path, array in arrays.items()
    }


def shards_of(
    arrays: Mapping[str, HostArray],
    forms: Mapping[str, StoredForm],
    compression: Compression | None = None,
) -> Iterator[ShardToWrite]:
    """Yield the outer shards that this process writes.

    Args:
        arrays: host arrays, by path.
        forms: stored forms of the leaves that are converted, by path.
        compression: compression of the chunks; None without.
    """
    for path, array in arrays.items():
        form, packed = forms.get(path), None
        if form is not None and form.kind == "packed":
            packed = (form.dtype, packed_axis(form.shape, array.shape))
        prefix = "/".join([array_name(path), "c"])
        shard = array.cut.shard
        for part in array.boxes:
            starts = (range(0, n, step) for n, step in zip(part.values.shape, shard, strict=True))
            for corner in itertools.product(*starts):
                box = tuple(slice(at, at + step) for at, step in zip(corner, shard, strict=True))
                origin = tuple(a + b for a, b in zip(part.origin, corner, strict=True))
                index = (str(at // step) for at, step in zip(origin, shard, strict=True))
                yield ShardToWrite(
                    key="/".join([prefix, *index]).encode(),
                    path=path,
                    values=part.values[box],
                    origin=origin,
                    chunk=array.cut.chunk,
                    packed=packed,
                    compression=compression,
                )


@functools.lru_cache(maxsize=4096)
def _sharding_text(sharding: jax.sharding.Sharding | None) -> str | None:
    """Return Orbax's JSON description of a sharding; None for kinds that have none."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        mesh = sharding.mesh
        return json.dumps(
            {
                "sharding_type": "NamedSharding",
                "shape": list(mesh.shape.values()),
                "axis_names": list(mesh.axis_names),
                "axis_types": [str(kind) for kind in mesh.axis_types],
                "partition_spec": tuple(sharding.spec),
                "device_mesh": {"mesh": _device_ids(mesh.devices.tolist())},
            }
        )
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(device)})
    return None


def _device_ids(devices: Any) -> Any:
    """Return nested lists of devices in Orbax's notation."""
    if isinstance(devices, list):
        return [_device_ids(device) for device in devices]
    return {"id": devices.id}


assert np.dtype("<u4").isnative, "values are written as they lie in memory: little endian"
