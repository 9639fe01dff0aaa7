"""The small files that make an item a tree that plain Orbax reads, and the keys of its arrays.

They follow from shapes, dtypes and shardings alone, and are made once for each. Imports JAX.

Source: orbax.checkpoint 0.12, `_src/metadata/{tree,sharding,array_metadata_store}.py` and
`_src/serialization/tensorstore_utils.py`, and files written by them.
"""

import base64
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np
import tensorstore as ts

from cairn.storage.arrays import (
    TREE_METADATA,
    ChunkShapes,
    Compression,
    ShardToWrite,
    StoredForm,
    array_name,
    codecs,
    packed_axis,
)
from cairn.storage.training.held_arrays import HeldArray

__all__ = ["description", "index_entries", "layouts_file", "shards"]

_SHARDINGS: Final = "_sharding"
_DICT_KEY: Final = 2
_LAYOUTS: Final = "array_metadatas/process_{}"


def description(held: Mapping[str, HeldArray]) -> dict[str, bytes]:
    """The files that describe the item as a whole; one process writes them."""
    shardings = {
        base64.urlsafe_b64encode(array_name(path).encode()).decode(): text
        for path, array in held.items()
        if (text := _sharding_text(array.sharding)) is not None
    }
    files = {TREE_METADATA: _tree_metadata(held)}
    if shardings:
        files[_SHARDINGS] = json.dumps(shardings, separators=(",", ":")).encode()
    return files


def layouts_file(held: Mapping[str, HeldArray], process: int) -> tuple[str, bytes]:
    """(name, content) of the file in which each process says how it cut the arrays."""
    layouts = [
        {
            "array_metadata": {
                "param_name": array_name(path),
                "write_shape": list(array.cut.shard),
                "chunk_shape": list(array.cut.chunk),
                "ext_metadata": array.key_impl and {"random_key_impl": array.key_impl},
            }
        }
        for path, array in held.items()
        if array.sharding is not None
    ]
    return _LAYOUTS.format(process), json.dumps({"array_metadatas": layouts}).encode()


def index_entries(
    held: Mapping[str, HeldArray], compression: Compression | None = None
) -> dict[bytes, bytes]:
    """The zarr description of each array, by its key in the database."""
    return {
        f"{array_name(path)}/zarr.json".encode(): _zarr_json(
            array.shape, array.dtype.name, array.cut, compression
        )
        for path, array in held.items()
    }


def shards(
    held: Mapping[str, HeldArray],
    forms: Mapping[str, StoredForm],
    compression: Compression | None = None,
) -> Iterator[ShardToWrite]:
    """The outer shards that this process writes."""
    for path, array in held.items():
        form, packed = forms.get(path), None
        if form is not None and form.kind == "packed":
            packed = (form.dtype, packed_axis(form.shape, array.shape))
        prefix = "/".join([array_name(path), "c"])
        shard = array.cut.shard
        for part in array.parts:
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


def _tree_metadata(held: Mapping[str, HeldArray]) -> bytes:
    entries = {}
    for path, array in held.items():
        keys = path.split("/") if path else []
        value: dict[str, Any] = {
            "value_type": "np.ndarray" if array.sharding is None else "jax.Array",
            "skip_deserialize": False,
        }
        if array.sharding is not None:
            value["write_shape"] = list(array.cut.shard)
        entries[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": value,
        }
    return json.dumps(
        {
            "tree_metadata": entries,
            "use_ocdbt": True,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    ).encode()


@functools.lru_cache(maxsize=4096)
def _sharding_text(sharding: jax.sharding.Sharding | None) -> str | None:
    """As Orbax describes a sharding; None for kinds that it has no description of."""
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
    """Nested lists of devices, each as Orbax names it."""
    if isinstance(devices, list):
        return [_device_ids(one) for one in devices]
    return {"id": devices.id}


@functools.lru_cache(maxsize=4096)
def _zarr_json(
    shape: tuple[int, ...], dtype: str, cut: ChunkShapes, compression: Compression | None
) -> bytes:
    """As TensorStore writes it, which knows dtypes' names and fill values."""
    of_chunks, of_index = codecs(compression)
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory"},
        "metadata": {
            "shape": list(shape),
            "data_type": dtype,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": list(cut.shard)},
            },
            "codecs": [
                {
                    "name": "sharding_indexed",
                    "configuration": {
                        "chunk_shape": list(cut.chunk),
                        "codecs": of_chunks,
                        "index_codecs": of_index,
                        "index_location": "end",
                    },
                }
            ],
        },
    }
    array = ts.open(spec, create=True, context=ts.Context()).result()
    store: Any = array.kvstore
    return bytes(store["zarr.json"])


assert np.dtype("<u4").isnative, "values are written as they lie in memory: little endian"
