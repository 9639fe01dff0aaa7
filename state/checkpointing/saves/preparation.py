"""Check of a save's arguments, and preparation of its arrays for staging.

All errors in the arguments are found here, before anything is written. Imports JAX.
"""

import json
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, SupportsIndex, get_args

import jax
import jax.numpy as jnp
import numpy as np

from cairn.state.checkpointing.device_digests import (
    DeviceDigests,
    DeviceShard,
    has_digest,
    start_digests,
)
from cairn.state.checkpointing.iterators import IteratorState, capture_states
from cairn.state.checkpointing.leaf_forms import is_computed, is_key_dtype, store_form
from cairn.state.checkpointing.modules import TreePlan
from cairn.state.checkpointing.save_options import SaveOptions
from cairn.state.checkpointing.saves.dedup import Dedup
from cairn.state.checkpointing.saves.host_arrays import (
    DeferredLeaf,
    HostView,
    Transfers,
    array_layout,
    host_views,
    is_in_host_memory,
    is_read_by_columns,
    on_host,
)
from cairn.storage.arrays.data_files import Compression
from cairn.storage.arrays.orbax_tree import JSON_FILES, META_ITEM, StoredForm
from cairn.storage.errors import InvalidURIError, UnsupportedFormatError
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.assets import checked_assets
from cairn.storage.runs.records.layout import COMMIT_FILE, INDEX_FILE, check_step
from cairn.storage.runs.records.manifest import ModelInfo, refuse_crowded_step
from cairn.storage.store.bounds import check_writable
from cairn.storage.store.records import canonical_json
from cairn.storage.store.uri import check_segment, is_text

__all__ = [
    "PreparedTree",
    "Save",
    "check_items",
    "may_be_digested",
    "places_of",
    "prepare",
    "shards_here",
]

_RESERVED_ITEMS: Final = frozenset(
    {META_ITEM, "metrics", "descriptor", "default", "auto"}
    | {COMMIT_FILE, INDEX_FILE, "orbax.checkpoint"}
)
"""Item names that Orbax or Cairn use otherwise. Names that begin with "_" are reserved, too."""


_NBYTES: Final = operator.attrgetter("nbytes")


@dataclass(frozen=True, kw_only=True)
class Save:
    """Content of a save without its arrays, so that it keeps none of the caller's in memory.

    Attributes:
        step: the step's number.
        names: names of all items, including the JSON item.
        nbytes: bytes of all arrays, on all processes; typed PRNG keys do not count.
        meta: content of the JSON item.
        iterators: the states of this process's iterators, by name.
        model: description of the model, for the manifest.
        annotation: labels and metrics as stored, if any.
        assets: small files by name.
        compression: compression of the stored chunks; None without.
    """

    step: int
    names: tuple[str, ...]
    nbytes: int
    meta: Mapping[str, Any]
    iterators: Mapping[str, IteratorState]
    model: ModelInfo | None
    annotation: Annotation | None
    assets: Mapping[str, bytes]
    compression: Compression | None


class PreparedTree(NamedTuple):
    """Tree of a save whose arrays are ready to be staged. All mappings are by path.

    Attributes:
        leaves: the leaves as the caller passed them.
        views: views of the leaves that are in host memory already.
        forms: stored forms of the leaves that are converted.
        transfers: transfers of the other leaves that have elements, in their stored form.
        deferred: leaves that equal the last step's and are to be linked.
        digests: device digests of the leaves that did not change in earlier saves.
    """

    leaves: Mapping[str, Any]
    views: Mapping[str, HostView]
    forms: Mapping[str, StoredForm]
    transfers: Transfers
    deferred: Mapping[str, DeferredLeaf]
    digests: DeviceDigests


def prepare(
    step: SupportsIndex,
    items: Any,
    options: SaveOptions,
    *,
    plan: TreePlan,
    dedup: Callable[[str], Dedup],
) -> tuple[Save, dict[str, PreparedTree]]:
    """Check the arguments of a save; return its content, and its trees by item, not copied yet.

    Args:
        step: the step's number.
        items: the items, as for `Checkpointer.save`.
        options: the options of `Checkpointer.save`.
        plan: cache of the structure of the previous save's trees.
        dedup: function from an item's name to its deduplication.

    Raises:
        InvalidURIError: the step or an item's name can't be used.
        UnsupportedLeafError: leaves, keys or states of iterators can't be stored; all are listed.
        UnsupportedFormatError: an argument has a wrong type, `meta` or the model's config is not
            JSON, a label is no text, a metric is no number, or `compression` is unknown.
    """
    number = check_step(step)
    compression, model = options.compression, options.model
    _check_type("overwrite", options.overwrite, (bool, np.bool_), "True or False")
    _check_type(
        "meta", options.meta, (Mapping,), "a mapping of JSON, {} if there is nothing to say"
    )
    _check_type("model", model, (ModelInfo, type(None)), "a ModelInfo or None")
    _check_type(
        "assets", options.assets, (Mapping, type(None)), "contents of files by name, or None"
    )
    if compression not in (None, *get_args(Compression)):
        raise UnsupportedFormatError(
            "unknown compression",
            path="compression",
            expected=f"None or one of {', '.join(map(repr, get_args(Compression)))}",
            found=repr(compression),
        )
    flat = plan.flatten(items)
    views: dict[str, dict[str, HostView]] = {}
    stored: dict[str, dict[str, Any]] = {}
    forms: dict[str, dict[str, StoredForm]] = {}
    deferred: dict[str, dict[str, DeferredLeaf]] = {}
    digests: dict[str, DeviceDigests] = {}
    for name in flat:
        _check_name(name)
        views[name] = host_views(flat[name])
        rest = {}
        if len(views[name]) < len(flat[name]):
            rest = {path: leaf for path, leaf in flat[name].items() if path not in views[name]}
        earlier = dedup(name)
        same = earlier.same(rest)
        digests[name] = _digests(name, rest, earlier, same)
        if digests[name].paths & earlier.digests.keys():
            same |= earlier.equal(digests[name].values())
        same = frozenset(path for path in same if _may_wait(rest[path]))
        deferred[name] = {
            path: DeferredLeaf.of(
                rest[path], layout.shape, layout.dtype, columns=is_read_by_columns(name)
            )
            for path, layout in earlier.linkable(same, compression).items()
        }
        stored[name], forms[name] = store_form(rest, deferred[name])
        # Shape and dtype are read later; a view keeps them if the NumPy array is reshaped.
        flat[name].update(
            (path, leaf.view()) for path, leaf in rest.items() if isinstance(leaf, np.ndarray)
        )
    refuse_crowded_step(sum(map(len, flat.values())), 0, path="the tree to save")
    as_json = canonical_json(dict(options.meta), path=META_ITEM)
    check_writable(f"{META_ITEM}/{JSON_FILES[0]}", len(as_json))
    copied: dict[str, Any] = json.loads(as_json)
    annotation = Annotation.of(options.labels, options.metrics, options.better)
    if model is not None:  # the caller may change the dict during the save
        config = json.loads(canonical_json(model.config, path="model.config"))
        model = model.model_copy(update={"config": config})
    assets = checked_assets(options.assets)
    states = capture_states(options.iterators)
    # All arguments are checked now; no error in them can follow.
    prepared = {
        name: PreparedTree(
            flat[name],
            views[name],
            forms[name],
            Transfers(name, leaves),
            deferred[name],
            digests[name],
        )
        for name, leaves in stored.items()
    }
    nbytes = sum(_bytes_of(leaf) for leaves in stored.values() for leaf in leaves.values())
    nbytes += sum(sum(map(_NBYTES, leaves.values())) for leaves in views.values())
    nbytes += sum(leaf.nbytes for leaves in deferred.values() for leaf in leaves.values())
    save = Save(
        step=number,
        names=tuple(sorted([*flat, META_ITEM])),
        nbytes=nbytes,
        meta=copied,
        iterators=states,
        model=model,
        annotation=annotation,
        assets=assets,
        compression=compression,
    )
    return save, prepared


def check_items(items: Any) -> None:
    """Check, before the first save, that these items can be saved. Reads no array.

    Args:
        items: the items, as for `Checkpointer.save`.

    Raises:
        InvalidURIError: an item's name can't be used.
        UnsupportedFormatError: `items` is neither a tree nor a mapping of trees.
        UnsupportedLeafError: leaves or keys of an item can't be stored; all are listed.
    """
    for name, leaves in TreePlan().flatten(items).items():
        _check_name(name)
        store_form(leaves, without=leaves.keys())


def _digests(
    item: str, leaves: Mapping[str, Any], earlier: Dedup, same: Collection[str]
) -> DeviceDigests:
    """Start device digests of the leaves that have not changed so far.

    Args:
        item: the item's name.
        leaves: the item's leaves, by path.
        earlier: the item's deduplication.
        same: paths of the leaves that are the very array objects of the last step.
    """
    watched = earlier.watched
    if on_host() or not watched:
        return DeviceDigests()
    digested = {
        path: leaf
        for path, leaf in leaves.items()
        if path in watched and path not in same and may_be_digested(leaf)
    }
    numbers = {path: shards_here(item, leaf) for path, leaf in digested.items()}
    shards = {
        path: [leaf.addressable_data(number) for number in numbers[path]]
        for path, leaf in digested.items()
    }
    places = {path: places_of(leaf, numbers[path]) for path, leaf in digested.items()}
    digests = {path: digest for path, digest in earlier.digests.items() if path in same}
    return start_digests(shards, places)._replace(earlier=digests)


def may_be_digested(leaf: Any) -> bool:
    """Return True if the devices that hold a leaf can compute its digest."""
    return (
        isinstance(leaf, jax.Array)
        and leaf.size > 0
        and has_digest(leaf.dtype)
        and _may_wait(leaf)
        and not is_in_host_memory(leaf)
    )


def shards_here(item: str, leaf: jax.Array) -> list[int]:
    """Return the numbers of the device shards, as in `addressable_data`, that this process writes.

    A shard counts if this process writes any box of it.
    """
    boxes = array_layout(leaf, columns=is_read_by_columns(item)).boxes
    return sorted({box.shard for box in boxes})


def places_of(leaf: jax.Array, shards: Iterable[int]) -> list[DeviceShard]:
    """Return device, shape and dtype of these shards; works for donated arrays, too."""
    devices: list[Any] = [*leaf.sharding.addressable_devices_indices_map(leaf.shape)]
    shape, dtype = leaf.sharding.shard_shape(leaf.shape), np.dtype(leaf.dtype).name
    return [DeviceShard(devices[number], shape, dtype) for number in shards]


def _may_wait(leaf: jax.Array) -> bool:
    """Return True if a leaf that equals the last step's should be deferred, not kept as a view.

    True for leaves on devices other than CPUs. If the leaf is converted for storage, True only in a
    job of one process, as several would have to convert it together, and on CPUs only for integers
    smaller than a byte, of which NumPy has no view.
    """
    if is_key_dtype(leaf.dtype):
        return False
    if is_computed(leaf):
        alone = jax.process_count() == 1
        return alone and (not on_host() or bool(jnp.issubdtype(leaf.dtype, jnp.integer)))
    return not on_host()


def _check_type(argument: str, value: object, kinds: tuple[type, ...], expected: str) -> None:
    if not isinstance(value, kinds):
        raise UnsupportedFormatError(
            "an argument of another type",
            path=argument,
            expected=expected,
            found=f"{type(value).__name__} {value!r}"[:200],
            next_step="Correct the call; nothing was written.",
        )


def _check_name(name: Any) -> None:
    if not is_text(name):
        raise InvalidURIError(
            "invalid item name",
            path=f"items: {name!r}",
            expected="text that UTF-8 has a form for",
            found=type(name).__name__,
            next_step='Name each item, such as {"model": params}.',
        )
    check_segment(name, within=f"item {name!r}")
    if name in _RESERVED_ITEMS or name.startswith("_"):
        raise InvalidURIError(
            "invalid item name",
            path=f"items: {name!r}",
            expected=f'none of {", ".join(sorted(_RESERVED_ITEMS))}, and no "_" in front',
            found="a reserved one",
            next_step="Choose another name.",
        )


def _bytes_of(leaf: Any) -> int:
    if is_key_dtype(leaf.dtype):
        return 0
    shape: tuple[int, ...] = leaf.shape
    itemsize: int = np.dtype(leaf.dtype).itemsize
    return math.prod(shape) * itemsize
