"""A call of `save`: what it asks for, whether it can be done, and its arrays on their way.

Imports JAX.
"""

import json
import math
import weakref
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, get_args

import jax
import numpy as np

from cairn.storage.arrays import Compression
from cairn.storage.errors import InvalidURIError, UnsupportedFormatError
from cairn.storage.runs import Annotation, ModelInfo, check_step, checked_assets
from cairn.storage.store import canonical_json, check_segment
from cairn.storage.training.held_arrays import Transfers
from cairn.storage.training.leaf_forms import is_key_dtype, store_form
from cairn.storage.training.leaf_records import LeafDraft, draft_leaves
from cairn.storage.training.orbax_save import META_ITEM, StoredItem
from cairn.storage.training.tree_handler import HeldItem, WrittenItem
from cairn.storage.training.trees import flatten
from cairn.storage.training.unchanged import Unchanged

__all__ = ["PreparedSave", "SaveRequest", "prepare"]

_RESERVED_ITEMS: Final = frozenset({META_ITEM, "metrics", "descriptor", "default", "auto"})


@dataclass(frozen=True, kw_only=True)
class SaveRequest:
    """The arguments of `Checkpointer.save`, which says what they are."""

    step: int
    items: Mapping[str, Any]
    meta: Mapping[str, Any]
    model: ModelInfo | None
    assets: Mapping[str, bytes] | None
    metrics: Mapping[str, Any] | None
    labels: Mapping[str, str] | None
    overwrite: bool
    compression: Compression | None


class PreparedSave(NamedTuple):
    """A save that can begin.

    Attributes:
        given: the leaves of each item, as they were given.
        stored: the items as they are stored.
        transfers: their arrays on the way to the host.
        leaves: of all items, without data.
        meta: a copy.
        annotation: labels and metrics as stored, if any.
        assets: small files by name.
        compression: of the stored chunks.
    """

    given: Mapping[str, Mapping[str, Any]]
    stored: Mapping[str, StoredItem]
    transfers: Mapping[str, Transfers]
    leaves: tuple[LeafDraft, ...]
    meta: Mapping[str, Any]
    annotation: bytes | None
    assets: Mapping[str, bytes]
    compression: Compression | None

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, on all processes; of typed PRNG keys nothing."""
        return sum(
            math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
            for item in self.stored.values()
            for leaf in item.leaves.values()
            if not is_key_dtype(leaf.dtype)
        )

    def hold(self, unchanged: MutableMapping[str, Unchanged]) -> dict[str, HeldItem]:
        """The items, once the host has all of their arrays.

        Args:
            unchanged: what is known of each item over the saves of the run.
        """
        held = {}
        for name, item in self.stored.items():
            known = unchanged.setdefault(name, Unchanged())
            given = self.given[name]
            held[name] = HeldItem(
                held=self.transfers[name].wait(),
                forms=item.forms,
                written=WrittenItem(),
                unchanged=known,
                same=known.same(given),
                leaves={
                    path: weakref.ref(leaf)
                    for path, leaf in given.items()
                    if isinstance(leaf, jax.Array)
                },
                compression=self.compression,
            )
        return held


def prepare(request: SaveRequest) -> PreparedSave:
    """Find everything that can be wrong with the call itself, and start the transfers.

    Raises:
        InvalidURIError: an item's name can't be used.
        UnsupportedLeafError: leaves or keys that can't be stored; all are listed.
        UnsupportedFormatError: `meta` or the model's config is not JSON, or `compression` is not
            one we know.
    """
    check_step(request.step)
    if request.compression not in (None, *get_args(Compression)):
        raise UnsupportedFormatError(
            "unknown compression",
            path="compression",
            expected=f"None or one of {', '.join(map(repr, get_args(Compression)))}",
            found=repr(request.compression),
        )
    flat: dict[str, dict[str, Any]] = {}
    stored: dict[str, StoredItem] = {}
    for name, tree in request.items.items():
        check_segment(name, within=f"item {name!r}")
        if name in _RESERVED_ITEMS or name.startswith("_"):
            raise InvalidURIError(
                "invalid item name",
                path=repr(name),
                expected=f"a name other than {', '.join(sorted(_RESERVED_ITEMS))}",
                found="a reserved one",
            )
        flat[name] = flatten(tree)
        stored[name] = StoredItem(*store_form(flat[name]))
    meta: dict[str, Any] = json.loads(canonical_json(dict(request.meta), path=META_ITEM))
    annotation = Annotation.of(request.labels, request.metrics)
    if request.model is not None:
        canonical_json(request.model.config, path="model.config")
    assets = checked_assets(request.assets)
    transfers = {name: Transfers(name, item.leaves) for name, item in stored.items()}
    leaves = [
        leaf
        for name, item in stored.items()
        for leaf in draft_leaves(
            name, flat[name], item, transfers[name].layouts, request.compression
        )
    ]
    return PreparedSave(
        given=flat,
        stored=stored,
        transfers=transfers,
        leaves=tuple(leaves),
        meta=meta,
        annotation=annotation.to_bytes() if annotation else None,
        assets=assets,
        compression=request.compression,
    )
