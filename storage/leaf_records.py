"""What the manifest says about leaves: drafted from the arrays, completed once Orbax has cut them.

Imports JAX.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from storage.chunk_codec import ChunkTable
from storage.four_bits import packed_axis
from storage.leaf_forms import dtype_name
from storage.manifest import LeafRecord
from storage.orbax_save import StoredItem

__all__ = ["LeafDraft", "draft_leaves", "leaf_records"]

Spec = tuple[str | tuple[str, ...] | None, ...]


class LeafDraft(NamedTuple):
    """A leaf without its data.

    Attributes:
        item: the item it belongs to.
        path: "/"-joined.
        shape: logical global shape.
        dtype: logical dtype by name.
        spec: mesh axes per axis of a named sharding, else None.
        packed: the axis along which two elements are stored in a byte, else None.
    """

    item: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    packed: int | None


def draft_leaves(item: str, leaves: Mapping[str, Any], stored: StoredItem) -> list[LeafDraft]:
    """One draft per leaf. Holds no array, so that the caller's may be freed.

    Args:
        item: the item's name.
        leaves: as they were given, by path.
        stored: as they go to Orbax.
    """
    packed = {
        path: packed_axis(form.shape, stored.leaves[path].shape)
        for path, form in stored.forms.items()
        if form.kind == "packed"
    }
    return [
        LeafDraft(
            item, path, tuple(np.shape(leaf)), _dtype_of(leaf), _spec_of(leaf), packed.get(path)
        )
        for path, leaf in leaves.items()
    ]


def leaf_records(drafts: Iterable[LeafDraft], table: ChunkTable) -> tuple[LeafRecord, ...]:
    """The manifest's leaves; one that stores no array has no shards and no chunks."""
    records = []
    for draft in drafts:
        cut = table.get((draft.item, draft.path.replace("/", ".")))
        records.append(
            LeafRecord(
                item=draft.item,
                path=draft.path,
                shape=draft.shape,
                dtype=draft.dtype,
                spec=draft.spec,
                chunks=_elements(cut.chunk, draft.packed) if cut else None,
                shards=_elements(cut.shard, draft.packed) if cut else None,
            )
        )
    return tuple(records)


def _elements(stored: tuple[int, ...], packed: int | None) -> tuple[int, ...]:
    """The shape of a stored part, counted in the leaf's elements."""
    if packed is None:
        return stored
    return (*stored[:packed], 2 * stored[packed], *stored[packed + 1 :])


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
    given = tuple(sharding.spec)
    padded = given + (None,) * (np.ndim(leaf) - len(given))
    return tuple(tuple(axes) if isinstance(axes, list | tuple) else axes for axes in padded)
