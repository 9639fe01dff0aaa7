"""Checked arguments of a save: what it stores, and its arrays, ready to be staged.

All errors in the call itself are found here, before anything is written. Imports JAX.
"""

import json
import math
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from cairn.state.checkpointing.leaf_forms import (
    dtype_name,
    is_computed,
    is_key_dtype,
    store_form,
)
from cairn.state.checkpointing.modules import TreePlan
from cairn.state.checkpointing.saves.dedup import Dedup
from cairn.state.checkpointing.saves.host_arrays import (
    DeferredLeaf,
    HostArray,
    HostView,
    Transfers,
    array_layout,
    host_views,
    is_in_host_memory,
    is_read_by_columns,
    on_gpu,
    on_host,
    viewed,
)
from cairn.state.checkpointing.saves.host_buffers import (
    MIN_COPIED_BYTES,
    HostBuffers,
    places,
)
from cairn.state.checkpointing.saves.save_handle import StagingKind
from cairn.state.checkpointing.saves.save_options import SaveOptions
from cairn.state.checkpointing.saves.staging import (
    Staging,
    boxes_to_copy,
    copier,
    default_copy_bytes,
    divide_memory,
    pinned_budget,
    plan_waves,
)
from cairn.state.checkpointing.saves.tree_writer import HostTree
from cairn.storage.arrays.chunks import ChunkShapes
from cairn.storage.arrays.data_file_writers import UploadMemory
from cairn.storage.arrays.data_files import Compression
from cairn.storage.arrays.digests import digest_text, total
from cairn.storage.arrays.four_bits import packed_axis, unpacked_shape
from cairn.storage.arrays.orbax_tree import JSON_FILES, META_ITEM, StoredForm
from cairn.storage.errors import InvalidURIError, UnsupportedFormatError
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.assets import checked_assets
from cairn.storage.runs.records.index_writer import PlacedShard
from cairn.storage.runs.records.layout import COMMIT_FILE, INDEX_FILE, check_step
from cairn.storage.runs.records.manifest import LeafRecord, ModelInfo, refuse_crowded_step
from cairn.storage.store.bounds import check_writable
from cairn.storage.store.records import canonical_json
from cairn.storage.store.uri import check_segment, is_text

__all__ = [
    "HostTrees",
    "PreparedTree",
    "Save",
    "copies_of",
    "kinds_of_leaves",
    "prepare",
    "with_digests",
]

_RESERVED_ITEMS: Final = frozenset(
    {META_ITEM, "metrics", "descriptor", "default", "auto"}
    | {COMMIT_FILE, INDEX_FILE, "orbax.checkpoint"}
)
"""Item names with another meaning to Orbax or Cairn; so have all that begin with "_"."""

_NBYTES: Final = operator.attrgetter("nbytes")

Spec = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True, kw_only=True)
class Save:
    """Content of a save, without arrays, so that the caller's may be freed.

    Attributes:
        step: step number.
        names: of all items, including the JSON item.
        nbytes: bytes of all arrays, on all processes; typed PRNG keys do not count.
        meta: the item of JSON.
        iterators: the states of this process's iterators, by name.
        model: description of the model, for the manifest.
        annotation: labels and metrics as stored, if any.
        assets: small files by name.
        compression: of the stored chunks.
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
    """Tree whose arrays are on their way to the host.

    Attributes:
        leaves: as the caller passed them, by path.
        views: those that are on the host already.
        forms: of those that are stored in another form.
        transfers: the others that have elements, in their stored form.
        deferred: those that the last step has, to be linked.
        digests: of those unchanged so far, computed on devices.
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
    """Check the arguments of a save; return what it stores, and its arrays by item, not copied.

    `plan` caches the trees of the previous save, and `dedup` returns an item's state of
    deduplication over the saves of the run; other args as in `Checkpointer.save`.

    Raises:
        InvalidURIError: a step or an item's name that can't be used.
        UnsupportedLeafError: leaves, keys or states of iterators that can't be stored; all are
            listed.
        UnsupportedFormatError: an argument of another type, `meta` or the model's config that is
            not JSON, labels that are no text, metrics that are no numbers, or an unknown
            `compression`.
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
        rest = _without(flat[name], views[name])
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
    annotation = Annotation.of(options.labels, options.metrics)
    if model is not None:  # the caller may change the dict during the save
        config = json.loads(canonical_json(model.config, path="model.config"))
        model = model.model_copy(update={"config": config})
    assets = checked_assets(options.assets)
    states = capture_states(options.iterators)
    # Last: after this no argument can be refused.
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


def _digests(
    item: str, leaves: Mapping[str, Any], earlier: Dedup, same: Collection[str]
) -> DeviceDigests:
    """Start device digests of the leaves that have not changed so far.

    Args:
        item: its name.
        leaves: of it, by path.
        earlier: state of deduplication of the item.
        same: paths of the leaves that are the last step's arrays themselves.
    """
    watched = earlier.watched
    if on_host() or not watched:
        return DeviceDigests()
    digested = {
        path: leaf
        for path, leaf in leaves.items()
        if path in watched and path not in same and _may_be_digested(leaf)
    }
    numbers = {path: _shards_here(item, leaf) for path, leaf in digested.items()}
    shards = {
        path: [leaf.addressable_data(number) for number in numbers[path]]
        for path, leaf in digested.items()
    }
    places = {path: _places_of(leaf, numbers[path]) for path, leaf in digested.items()}
    digests = {path: digest for path, digest in earlier.digests.items() if path in same}
    return start_digests(shards, places)._replace(earlier=digests)


def _may_be_digested(leaf: Any) -> bool:
    return (
        isinstance(leaf, jax.Array)
        and leaf.size > 0
        and has_digest(leaf.dtype)
        and _may_wait(leaf)
        and not is_in_host_memory(leaf)
    )


def _shards_here(item: str, leaf: jax.Array) -> list[int]:
    """List the indices of the shards of which this process writes something."""
    boxes = array_layout(leaf, columns=is_read_by_columns(item)).boxes
    return sorted({box.shard for box in boxes})


def _places_of(leaf: jax.Array, shards: Iterable[int]) -> list[DeviceShard]:
    """List the places of shards; works for donated arrays, too."""
    devices: list[Any] = [*leaf.sharding.addressable_devices_indices_map(leaf.shape)]
    shape, dtype = leaf.sharding.shard_shape(leaf.shape), np.dtype(leaf.dtype).name
    return [DeviceShard(devices[number], shape, dtype) for number in shards]


def _may_wait(leaf: jax.Array) -> bool:
    """Return True if a leaf to be linked is better deferred than held as a view.

    Those are leaves outside of host memory, and leaves whose stored form must be computed; the
    latter only with one process, as several would have to compute it together. On CPUs only
    integers below a byte count: NumPy has no view of them.
    """
    if is_key_dtype(leaf.dtype):
        return False
    if is_computed(leaf):
        alone = jax.process_count() == 1
        return alone and (not on_host() or bool(jnp.issubdtype(leaf.dtype, jnp.integer)))
    return not on_host()


def _without(leaves: Mapping[str, Any], others: Collection[str]) -> dict[str, Any]:
    if len(others) == len(leaves):
        return {}
    return {path: leaf for path, leaf in leaves.items() if path not in others}


def kinds_of_leaves(
    items: Mapping[str, PreparedTree],
) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Return (item, path, shape, dtype) of all leaves, which must agree on all processes."""
    return [
        (name, path, tuple(np.shape(leaf)), _dtype_of(leaf))
        for name, item in items.items()
        for path, leaf in item.leaves.items()
    ]


class Memory(NamedTuple):
    """Host memory that a save may use.

    Attributes:
        buffers: memory to copy arrays into. Views are then held only of small arrays, and of those
            that the last step stored; None holds views of all.
        most: maximum bytes of all copies, see `staging`; None has no limit.
        uploads: the step goes to an object store.
    """

    buffers: HostBuffers | None = None
    most: int | None = None
    uploads: bool = False


class HostTrees(Mapping[str, HostTree]):
    """Items of a save by name, once the host has all of their arrays.

    With limited memory the host may have a first wave only: see `copy_rest`.

    Further descriptions are computed on first use, after `save` has returned: they take longer than
    holding a small leaf.
    """

    def __init__(
        self,
        items: Mapping[str, PreparedTree],
        dedup: Callable[[str], Dedup],
        compression: Compression | None,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ) -> None:
        """Wait for the arrays, or for a first wave of them.

        Args:
            items: from `prepare`.
            dedup: returns an item's state of deduplication over the saves of the run.
            compression: of the stored chunks.
            memory: that this may use.

        Raises:
            PolicyError: the copies exceed the limit.
        """
        self._dedup = {name: dedup(name) for name in items}
        buffers, kept = memory.buffers, 0
        budget = default_copy_bytes() if memory.most is None and not on_host() else 1
        transfers = {name: item.transfers for name, item in items.items()}
        boxes = boxes_to_copy(transfers, numpy=memory.most is not None and buffers is None)
        left = {(box.item, box.path) for box in boxes}
        if buffers is None:
            self._prepared = dict(items)
            self._arrays = _waited(items, left)
        else:
            copied = copies_of(items, self._dedup.__getitem__)
            kept = copied.nbytes
            self._prepared, self._arrays = _with_copies(items, copied, buffers, left)
        total = sum(box.nbytes for box in boxes)
        self._uploads: UploadMemory | None = None
        if memory.most is not None:
            share = divide_memory(memory.most, kept=kept, staged=total, uploads=memory.uploads)
            self._uploads = UploadMemory(share.uploads) if memory.uploads else None
            budget = share.waves
        unlimited = memory.most is None and on_host()
        self._wave_bytes = math.inf if unlimited else budget / max(1, len(items))
        waves = plan_waves(boxes, pinned_budget(budget) if on_gpu() else budget)
        self._staging = Staging(waves, copier(transfers)) if waves else None
        self._compression = compression
        self._items: dict[str, HostTree] = {}
        self._records: tuple[LeafRecord, ...] = ()
        self._describing = threading.Lock()

    @property
    def records(self) -> tuple[LeafRecord, ...]:
        """Records of all leaves of all items, without digests."""
        self.describe()
        return self._records

    @property
    def waves(self) -> int:
        """Number of waves in which the arrays reach the host; 1 if they all fit."""
        return 1 if self._staging is None else len(self._staging.waves)

    @property
    def staging(self) -> StagingKind:
        """Way in which the arrays reach the host."""
        if self._staging is None:
            return "views"
        return "snapshot" if self.waves == 1 else "waves"

    def copy_rest(self, timeout: float | None = None) -> bool:
        """Copy the arrays that the host does not have yet, see `Staging.copy_rest`."""
        return self._staging is None or self._staging.copy_rest(timeout)

    def end(self, error: BaseException | None) -> None:
        """End the staging, see `Staging.end`."""
        if self._staging is not None:
            self._staging.end(error)

    def describe(self) -> None:
        """Compute the descriptions of the leaves, and drop the caller's leaves.

        A second caller waits, as the item writers may start while this runs.
        """
        with self._describing:
            self._describe()

    def _describe(self) -> None:
        records: list[LeafRecord] = []
        while self._prepared:
            name, item = next(iter(self._prepared.items()))
            arrays, dedup = _arrays(name, item, self._arrays.pop(name)), self._dedup[name]
            self._items[name] = HostTree(
                name=name,
                arrays=arrays,
                forms=item.forms,
                dedup=dedup,
                same=_proven(dedup, item),
                leaves={
                    path: weakref.ref(leaf)
                    for path, leaf in item.leaves.items()
                    if isinstance(leaf, jax.Array)
                },
                compression=self._compression,
                staging=self._staging,
                uploads=self._uploads,
                deferred=dict(item.deferred),
                wave_bytes=self._wave_bytes,
                digests=item.digests,
                places=_digestible(name, item.leaves, dedup),
            )
            records += _leaf_records(name, item, arrays, self._compression)
            del self._prepared[name]
        self._records += tuple(records)

    def __getitem__(self, name: str) -> HostTree:
        self.describe()
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dedup)

    def __len__(self) -> int:
        return len(self._dedup)


def _proven(dedup: Dedup, item: PreparedTree) -> frozenset[str]:
    """Return the paths of leaves that certainly equal what the last step stored.

    On CPU, identity with the last step's array proves nothing: an array may share NumPy's memory
    (`jax.device_put`, `from_dlpack`), to which its owner can write.
    """
    same = frozenset() if on_host() else dedup.same(item.leaves)
    return same | item.deferred.keys()


def _digestible(item: str, leaves: Mapping[str, Any], dedup: Dedup) -> dict[str, list[DeviceShard]]:
    """Return the places of leaves that devices may digest in later saves, if unchanged."""
    if on_host():
        return {}
    return {
        path: _places_of(leaf, _shards_here(item, leaf))
        for path, leaf in leaves.items()
        if path not in dedup.changing and _may_be_digested(leaf)
    }


class _Copies(NamedTuple):
    """Arrays that a save copies into kept buffers.

    Attributes:
        views: (item, path) of those that are on the host already.
        boxes: (item, path, number) of boxes of the others.
        nbytes: of all.
    """

    views: list[tuple[str, str]]
    boxes: list[tuple[str, str, int]]
    nbytes: int


def copies_of(items: Mapping[str, PreparedTree], dedup: Callable[[str], Dedup]) -> _Copies:
    """Return what `HostTrees` copies of these items, if it is given buffers.

    That is all NumPy arrays, since their owner may write to them, and those JAX arrays that would
    take long to copy when donated: large ones in host memory that must be written. For what the
    last step stored, a view is held until it is certain that nothing must be written.

    Args:
        items: from `prepare`.
        dedup: returns an item's state of deduplication over the saves of the run.
    """
    donated_late = on_host()  # arrays from other devices are copies already
    views, boxes, sizes = [], [], []
    for name, item in items.items():
        same = dedup(name).same(item.leaves)
        for path, view in item.views.items():
            if view.nbytes >= MIN_COPIED_BYTES and path not in same:
                views.append((name, path))
                sizes.append(view.nbytes)
        for path, part_sizes in item.transfers.sizes().items():
            always = item.transfers.is_numpy(path)
            for number, nbytes in enumerate(part_sizes):
                large = donated_late and nbytes >= MIN_COPIED_BYTES and path not in same
                if always or large:
                    boxes.append((name, path, number))
                    sizes.append(nbytes)
    return _Copies(views, boxes, places(sizes).nbytes)


def _with_copies(
    items: Mapping[str, PreparedTree],
    copied: _Copies,
    buffers: HostBuffers,
    left: Collection[tuple[str, str]],
) -> tuple[dict[str, PreparedTree], dict[str, dict[str, HostArray]]]:
    """Return the items with copies in place of views, and their other arrays."""
    waited = _waited(items, left, copied=False)
    views = {name: dict(item.views) for name, item in items.items()}
    copies = iter(
        buffers.copies(
            [np.asarray(views[name][path]) for name, path in copied.views]
            + [waited[name][path].boxes[number].values for name, path, number in copied.boxes]
        )
    )
    for name, path in copied.views:
        views[name][path] = next(copies)
    for name, path, number in copied.boxes:
        array = waited[name][path]
        boxes = list(array.boxes)
        boxes[number] = boxes[number]._replace(values=next(copies))
        waited[name][path] = array._replace(boxes=tuple(boxes))
    return {name: item._replace(views=views[name]) for name, item in items.items()}, waited


def _waited(
    items: Mapping[str, PreparedTree], left: Collection[tuple[str, str]], *, copied: bool = True
) -> dict[str, dict[str, HostArray]]:
    """Return, by item and path, the arrays without a view; those in `left` without boxes."""
    return {
        name: item.transfers.wait(
            copied=copied, without={path for owner, path in left if owner == name}
        )
        for name, item in items.items()
    }


def _arrays(name: str, item: PreparedTree, waited: Mapping[str, HostArray]) -> dict[str, HostArray]:
    """Return what is stored of an item, in the order of its leaves."""
    columns = is_read_by_columns(name)
    others = {**waited, **{path: leaf.outline() for path, leaf in item.deferred.items()}}
    return {
        path: viewed(item.views[path], leaf.sharding, columns=columns)
        if path in item.views
        else others[path]
        for path, leaf in item.leaves.items()
        if path in item.views or path in others
    }


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


def _leaf_records(
    name: str,
    item: PreparedTree,
    arrays: Mapping[str, HostArray],
    compression: Compression | None,
) -> list[LeafRecord]:
    """Return the record of each leaf, without digests; without shards if no array is stored."""
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
    """Return the records of all leaves with their digests.

    Args:
        records: of all leaves.
        shards: of the leaves that have any, by item and path.
    """
    return tuple(
        record.model_copy(
            update={"digest": digest_text(_total(shards.get((record.item, record.path), ())))}
        )
        for record in records
    )


def _total(shards: Iterable[PlacedShard]) -> int:
    """Return the digest of a leaf."""
    digests = [shard.digests.reshape(-1) for shard in shards]
    return total(np.concatenate(digests)) if len(digests) > 1 else sum(map(total, digests))


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
