"""Records of the leaves of a save, as its manifest keeps them. Imports JAX."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from cairn.state.checkpointing.leaf_forms import dtype_name
from cairn.state.checkpointing.saves.host_arrays import HostArray
from cairn.state.checkpointing.saves.preparation import PreparedTree
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_files import Compression
from cairn.storage.arrays.digests import digest_text, total
from cairn.storage.arrays.four_bits import packed_axis, unpacked_shape
from cairn.storage.runs.records.index_writer import PlacedShard
from cairn.storage.runs.records.manifest import LeafRecord

__all__ = ["kinds_of_leaves", "leaf_records", "with_digests"]

Spec = tuple[str | tuple[str, ...] | None, ...]


def kinds_of_leaves(
    items: Mapping[str, PreparedTree],
) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Return (item, path, shape, dtype) of all leaves, which must be equal on all processes."""
    return [
        (name, path, tuple(np.shape(leaf)), _dtype_of(leaf))
        for name, item in items.items()
        for path, leaf in item.leaves.items()
    ]


def leaf_records(
    name: str,
    item: PreparedTree,
    arrays: Mapping[str, HostArray],
    compression: Compression | None,
) -> list[LeafRecord]:
    """Return the manifest's record of each leaf of an item; `with_digests` adds the digests.

    Args:
        name: the item's name.
        item: the item that `prepare` returned.
        arrays: the stored arrays, by path; a leaf without one gets a record without chunks.
        compression: compression of the stored chunks; None without.
    """
    packed = {
        path: packed_axis(form.shape, arrays[path].shape)
        for path, form in item.forms.items()
        if form.kind == "packed"
    }
    records = []
    for path, leaf in item.leaves.items():
        cut = arrays[path].cut if path in arrays else None
        if cut is not None and path in packed:
            cut = ChunkShapes(*(unpacked_shape(shape, packed[path]) for shape in cut))
        records.append(
            LeafRecord(
                item=name,
                path=path,
                shape=tuple(np.shape(leaf)),
                dtype=_dtype_of(leaf),
                spec=_spec_of(leaf),
                chunks=cut.chunk if cut else None,
                shards=cut.shard if cut else None,
                compression=compression if cut else None,
            )
        )
    return records


def with_digests(
    records: Iterable[LeafRecord], shards: Mapping[tuple[str, str], Iterable[PlacedShard]]
) -> tuple[LeafRecord, ...]:
    """Return the records of leaves with their digests.

    Args:
        records: records of all leaves.
        shards: the shards of each leaf that has any, by (item, path).
    """
    digested = []
    for record in records:
        placed = shards.get((record.item, record.path), ())
        digests = [shard.digests.reshape(-1) for shard in placed]
        number = total(np.concatenate(digests)) if len(digests) > 1 else sum(map(total, digests))
        digested.append(record.model_copy(update={"digest": digest_text(number)}))
    return tuple(digested)


def _dtype_of(leaf: Any) -> str:
    match leaf:
        case bool():
            return "bool"
        case int():
            return "int64"
        case _:
            return dtype_name(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)


def _spec_of(leaf: Any) -> Spec | None:
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    spec = tuple(sharding.spec)
    padded = spec + (None,) * (np.ndim(leaf) - len(spec))
    return tuple(tuple(axes) if isinstance(axes, list | tuple) else axes for axes in padded)
