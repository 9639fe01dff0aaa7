"""What the manifest says about leaves: drafted from the arrays, completed once they are written.

Imports JAX.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from cairn.storage.arrays import (
    ChunkDigests,
    ChunkShapes,
    Compression,
    digest_text,
    packed_axis,
    unpacked_shape,
)
from cairn.storage.errors import CorruptionError
from cairn.storage.runs import LeafRecord
from cairn.storage.training.held_arrays import ArrayLayout
from cairn.storage.training.leaf_forms import dtype_name
from cairn.storage.training.orbax_save import StoredItem

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
        cut: how it is stored, in its own elements; None if nothing is stored.
        compression: of its chunks.
    """

    item: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec | None
    cut: ChunkShapes | None
    compression: Compression | None


def draft_leaves(
    item: str,
    leaves: Mapping[str, Any],
    stored: StoredItem,
    layouts: Mapping[str, ArrayLayout],
    compression: Compression | None,
) -> list[LeafDraft]:
    """One draft per leaf. Holds no array, so that the caller's may be freed.

    Args:
        item: the item's name.
        leaves: as they were given, by path.
        stored: as they are stored.
        layouts: how they are cut.
        compression: of their chunks.
    """
    packed = {
        path: packed_axis(form.shape, stored.leaves[path].shape)
        for path, form in stored.forms.items()
        if form.kind == "packed"
    }
    drafts = []
    for path, leaf in leaves.items():
        cut = layouts[path].cut if path in layouts else None
        if cut is not None and path in packed:
            cut = ChunkShapes(*(unpacked_shape(part, packed[path]) for part in cut))
        drafts.append(
            LeafDraft(
                item=item,
                path=path,
                shape=tuple(np.shape(leaf)),
                dtype=_dtype_of(leaf),
                spec=_spec_of(leaf),
                cut=cut,
                compression=compression if cut else None,
            )
        )
    return drafts


def leaf_records(
    drafts: Iterable[LeafDraft], digests: Mapping[str, ChunkDigests], *, path: object
) -> tuple[LeafRecord, ...]:
    """The manifest's leaves; one that stores no array has no shards and no chunks.

    Args:
        drafts: all leaves.
        digests: of all chunks, by item.
        path: the step's folder, for the error.

    Raises:
        CorruptionError: a leaf that stores an array has no digests: some process did not write it.
    """
    records = []
    for draft in drafts:
        total = digests[draft.item].total(draft.path) if draft.cut else 0
        if total is None:
            raise CorruptionError(
                "a leaf was not written",
                path=f"{path}: {draft.item}/{draft.path}",
                expected="digests of its chunks",
                found="none",
                next_step="Save again; the step is not listed.",
            )
        records.append(
            LeafRecord(
                item=draft.item,
                path=draft.path,
                shape=draft.shape,
                dtype=draft.dtype,
                spec=draft.spec,
                chunks=draft.cut.chunk if draft.cut else None,
                shards=draft.cut.shard if draft.cut else None,
                digest=digest_text(total),
                compression=draft.compression,
            )
        )
    return tuple(records)


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
