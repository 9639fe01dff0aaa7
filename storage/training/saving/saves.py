"""A call of `save`, checked: what it stores, without the arrays, and its arrays on their way.

Everything that can be wrong with the call itself is found here, before anything is written. Imports
JAX.
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

from cairn.storage.arrays import (
    JSON_FILES,
    META_ITEM,
    ChunkShapes,
    Compression,
    StoredForm,
    UploadMemory,
    digest_text,
    packed_axis,
    total,
    unpacked_shape,
)
from cairn.storage.errors import InvalidURIError, UnsupportedFormatError
from cairn.storage.runs import (
    COMMIT_FILE,
    INDEX_FILE,
    Annotation,
    LeafRecord,
    ModelInfo,
    PlacedShard,
    check_step,
    checked_assets,
    refuse_crowded_step,
)
from cairn.storage.store import canonical_json, check_segment, ensure_within, is_text
from cairn.storage.training.device_digests import DeviceDigests, Place, has_digest, start_digests
from cairn.storage.training.iterators import TakenState, take_states
from cairn.storage.training.leaf_forms import (
    dtype_name,
    is_computed,
    is_key_dtype,
    store_form,
)
from cairn.storage.training.modules import TreePlan
from cairn.storage.training.saving.held_arrays import (
    DeferredLeaf,
    HeldArray,
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
from cairn.storage.training.saving.item_writer import HeldItem
from cairn.storage.training.saving.kept_buffers import (
    LEAST_COPIED_BYTES,
    KeptBuffers,
    places,
)
from cairn.storage.training.saving.save_handle import StagingKind
from cairn.storage.training.saving.staging import (
    StagedItem,
    Staging,
    copier,
    granted,
    memory_unasked,
    parts_to_stage,
    pinned_budget,
    planned_waves,
)
from cairn.storage.training.saving.unchanged import Unchanged

__all__ = [
    "HeldItems",
    "Item",
    "LeafDraft",
    "Save",
    "kinds_of_leaves",
    "leaf_records",
    "prepare",
    "to_copy",
]

_RESERVED_ITEMS: Final = frozenset(
    {META_ITEM, "metrics", "descriptor", "default", "auto"}
    | {COMMIT_FILE, INDEX_FILE, "orbax.checkpoint"}
)
"""What Orbax or we keep in a step's folder, or give a meaning of their own; and all with "_"."""

_NBYTES: Final = operator.attrgetter("nbytes")

Spec = tuple[str | tuple[str, ...] | None, ...]


class LeafDraft(NamedTuple):
    """A leaf without its data.

    Attributes:
        item: the item it belongs to.
        path: as `path_of` makes it of the keys.
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


@dataclass(frozen=True, kw_only=True)
class Save:
    """What a save stores. Holds no array, so that the caller's may be freed.

    Attributes:
        step: step number.
        names: of all items, that of JSON too.
        nbytes: bytes of all arrays, on all processes; of typed PRNG keys nothing.
        meta: the item of JSON.
        iterators: the states of this process's iterators, by name.
        model: which model, for the manifest.
        annotation: labels and metrics as stored, if any.
        assets: small files by name.
        compression: of the stored chunks.
    """

    step: int
    names: tuple[str, ...]
    nbytes: int
    meta: Mapping[str, Any]
    iterators: Mapping[str, TakenState]
    model: ModelInfo | None
    annotation: Annotation | None
    assets: Mapping[str, bytes]
    compression: Compression | None


class Item(NamedTuple):
    """One tree, its arrays on their way to the host.

    Attributes:
        given: the leaves as they were given, by path.
        views: those that the host has already, held.
        forms: of those that are stored differently.
        transfers: the others that have elements, as they are stored.
        deferred: those that the last step has, and that are to be linked.
        digests: of those that did not change so far, as devices compute them.
    """

    given: Mapping[str, Any]
    views: Mapping[str, HostView]
    forms: Mapping[str, StoredForm]
    transfers: Transfers
    deferred: Mapping[str, DeferredLeaf]
    digests: DeviceDigests


def prepare(
    step: SupportsIndex,
    items: Any,
    *,
    meta: Mapping[str, Any],
    iterators: Mapping[str, Any] | None,
    model: ModelInfo | None,
    assets: Mapping[str, bytes] | None,
    metrics: Mapping[str, Any] | None,
    labels: Mapping[str, str] | None,
    compression: Compression | None,
    plan: TreePlan,
    unchanged: Callable[[str], Unchanged],
    overwrite: bool = False,
) -> tuple[Save, dict[str, Item]]:
    """Prepare what is stored, and its arrays by item, of which nothing is copied yet.

    `plan` is what there is to know of the trees of the save before, and `unchanged` gives what is
    known of an item over the saves of the run; other args as in `Checkpointer.save`.

    Raises:
        InvalidURIError: a step or an item's name that can't be used.
        UnsupportedLeafError: leaves, keys or states of iterators that can't be stored; all are
            listed.
        UnsupportedFormatError: an argument of another type, `meta` or the model's config that is
            not JSON, labels that are no text, metrics that are no numbers, or a `compression` that
            is not one we know.
    """
    number = check_step(step)
    _check_type("overwrite", overwrite, (bool, np.bool_), "True or False")
    _check_type("meta", meta, (Mapping,), "a mapping of JSON, {} if there is nothing to say")
    _check_type("model", model, (ModelInfo, type(None)), "a ModelInfo or None")
    _check_type("assets", assets, (Mapping, type(None)), "contents of files by name, or None")
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
        earlier = unchanged(name)
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
        # What these are is told later; an array of NumPy could have another shape by then.
        flat[name].update(
            (path, leaf.view()) for path, leaf in rest.items() if isinstance(leaf, np.ndarray)
        )
    refuse_crowded_step(sum(map(len, flat.values())), 0, path="the tree to save")
    as_json = canonical_json(dict(meta), path=META_ITEM)
    ensure_within(f"{META_ITEM}/{JSON_FILES[0]}", len(as_json))
    copied: dict[str, Any] = json.loads(as_json)
    annotation = Annotation.of(labels, metrics)
    if model is not None:  # the caller's dict may change while the save is under way
        config = json.loads(canonical_json(model.config, path="model.config"))
        model = model.model_copy(update={"config": config})
    checked = checked_assets(assets)
    states = take_states(iterators)
    # Last: from here on nothing is refused for what was given.
    prepared = {
        name: Item(
            flat[name],
            views[name],
            forms[name],
            Transfers(name, leaves),
            deferred[name],
            digests[name],
        )
        for name, leaves in stored.items()
    }
    nbytes = sum(_bytes_of(leaf) for one in stored.values() for leaf in one.values())
    nbytes += sum(sum(map(_NBYTES, one.values())) for one in views.values())
    nbytes += sum(leaf.nbytes for one in deferred.values() for leaf in one.values())
    save = Save(
        step=number,
        names=tuple(sorted([*flat, META_ITEM])),
        nbytes=nbytes,
        meta=copied,
        iterators=states,
        model=model,
        annotation=annotation,
        assets=checked,
        compression=compression,
    )
    return save, prepared


def _digests(
    item: str, leaves: Mapping[str, Any], earlier: Unchanged, same: Collection[str]
) -> DeviceDigests:
    """Have devices digest the leaves in their memory that so far did not change.

    Args:
        item: its name.
        leaves: of it, by path.
        earlier: what is known of it.
        same: paths of the very arrays of the last step.
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
    digests = {path: one for path, one in earlier.digests.items() if path in same}
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
    """List the numbers of the shards of which this process writes something."""
    pieces = array_layout(leaf, columns=is_read_by_columns(item)).pieces
    return sorted({piece.shard for piece in pieces})


def _places_of(leaf: jax.Array, shards: Iterable[int]) -> list[Place]:
    """List the places of shards; also of an array whose memory was given away."""
    devices: list[Any] = [*leaf.sharding.addressable_devices_indices_map(leaf.shape)]
    shape, dtype = leaf.sharding.shard_shape(leaf.shape), np.dtype(leaf.dtype).name
    return [Place(devices[number], shape, dtype) for number in shards]


def _may_wait(leaf: jax.Array) -> bool:
    """Tell whether a leaf that is to be linked is worth more than a view, until it is.

    That is one whose values are elsewhere, or whose stored form must be computed: by all
    processes, where several have a part of it. On CPUs it is one of integers below a byte, which
    lie in no memory of NumPy's.
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


def kinds_of_leaves(items: Mapping[str, Item]) -> list[tuple[str, str, tuple[int, ...], str]]:
    """(item, path, shape, dtype) of all leaves: what is the same on all processes."""
    return [
        (name, path, tuple(np.shape(leaf)), _dtype_of(leaf))
        for name, item in items.items()
        for path, leaf in item.given.items()
    ]


class Memory(NamedTuple):
    """The memory of the host that a save may use.

    Attributes:
        buffers: where arrays are copied to, so that no view of them is held but of small ones, and
            of those that the last step stored; None holds views of all.
        most: bytes of all that is copied, see `staging`; None has no limit.
        uploads: whether the step goes to an object store.
    """

    buffers: KeptBuffers | None = None
    most: int | None = None
    uploads: bool = False


class HeldItems(Mapping[str, HeldItem]):
    """The items of a save by name, once the host has all of their arrays.

    Where memory is limited it may have some of them first: see `copy_rest`.

    What follows from these alone is worked out when it is first asked for. The caller of `save`
    need not wait for that, which takes longer than to hold a small leaf.
    """

    def __init__(
        self,
        items: Mapping[str, Item],
        unchanged: Callable[[str], Unchanged],
        compression: Compression | None,
        memory: Memory = Memory(),  # noqa: B008 (frozen)
    ) -> None:
        """Wait for the arrays, or for a first wave of them.

        Args:
            items: as `prepare` gave them.
            unchanged: gives what is known of an item over the saves of the run.
            compression: of the stored chunks.
            memory: that this may use.

        Raises:
            PolicyError: the copies would take more than they may.
        """
        self._known = {name: unchanged(name) for name in items}
        buffers, kept = memory.buffers, 0
        budget = memory_unasked() if memory.most is None and not on_host() else 1
        transfers = {name: item.transfers for name, item in items.items()}
        parts = parts_to_stage(transfers, numpy=memory.most is not None and buffers is None)
        left = {(part.item, part.path) for part in parts}
        if buffers is None:
            self._given = dict(items)
            self._waited = _waited(items, left)
        else:
            copied = to_copy(items, self._known.__getitem__)
            kept = copied.nbytes
            self._given, self._waited = _with_copies(items, copied, buffers, left)
        total = sum(part.nbytes for part in parts)
        self._uploads: UploadMemory | None = None
        if memory.most is not None:
            share = granted(memory.most, kept=kept, staged=total, uploads=memory.uploads)
            self._uploads = UploadMemory(share.uploads) if memory.uploads else None
            budget = share.waves
        unlimited = memory.most is None and on_host()
        self._wave_bytes = math.inf if unlimited else budget / max(1, len(items))
        waves = planned_waves(parts, pinned_budget(budget) if on_gpu() else budget)
        self._staging = Staging(waves, copier(transfers)) if waves else None
        self._compression = compression
        self._items: dict[str, HeldItem] = {}
        self._leaves: tuple[LeafDraft, ...] = ()
        self._describing = threading.Lock()

    @property
    def leaves(self) -> tuple[LeafDraft, ...]:
        """All leaves of all items, without their data."""
        self.describe()
        return self._leaves

    @property
    def waves(self) -> int:
        """In how many the arrays come to the host; 1 if they all fit."""
        return 1 if self._staging is None else len(self._staging.waves)

    @property
    def staging(self) -> StagingKind:
        """The way in which the arrays come to the host."""
        if self._staging is None:
            return "views"
        return "snapshot" if self.waves == 1 else "waves"

    def copy_rest(self, timeout: float | None = None) -> bool:
        """Have the host get the arrays that it does not have yet, as `Staging.copy_rest` does."""
        return self._staging is None or self._staging.copy_rest(timeout)

    def end(self, error: BaseException | None) -> None:
        """The save is over, as `Staging.end` is told."""
        if self._staging is not None:
            self._staging.end(error)

    def describe(self) -> None:
        """Work out what there is to know of the leaves, and let go of those that were given.

        Whoever comes second waits: what writes the items may begin while this goes on.
        """
        with self._describing:
            self._describe()

    def _describe(self) -> None:
        leaves: list[LeafDraft] = []
        while self._given:
            name, item = next(iter(self._given.items()))
            arrays, known = _arrays(name, item, self._waited.pop(name)), self._known[name]
            self._items[name] = HeldItem(
                arrays=arrays,
                forms=item.forms,
                unchanged=known,
                same=_proven(known, item),
                leaves={
                    path: weakref.ref(leaf)
                    for path, leaf in item.given.items()
                    if isinstance(leaf, jax.Array)
                },
                compression=self._compression,
                staged=None if self._staging is None else StagedItem(self._staging, name),
                uploads=self._uploads,
                deferred=dict(item.deferred),
                wave_bytes=self._wave_bytes,
                digests=item.digests,
                places=_digestible(name, item.given, known),
            )
            leaves += _draft_leaves(name, item, arrays, self._compression)
            del self._given[name]
        self._leaves += tuple(leaves)

    def __getitem__(self, name: str) -> HeldItem:
        self.describe()
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _proven(known: Unchanged, item: Item) -> frozenset[str]:
    """Paths of the leaves that hold what the last step stored, whoever shares their memory.

    An array of a CPU device may lie in NumPy's memory (`jax.device_put`, `from_dlpack`), to which
    its owner can write: that it is the very array of the last step proves nothing there.
    """
    same = frozenset() if on_host() else known.same(item.given)
    return same | item.deferred.keys()


def _digestible(item: str, leaves: Mapping[str, Any], known: Unchanged) -> dict[str, list[Place]]:
    """Where the leaves lie that devices may have to digest, should they turn out unchanged."""
    if on_host():
        return {}
    return {
        path: _places_of(leaf, _shards_here(item, leaf))
        for path, leaf in leaves.items()
        if path not in known.changing and _may_be_digested(leaf)
    }


class _Copied(NamedTuple):
    """What a save copies of its arrays, where it does.

    Attributes:
        views: (item, path) of those that the host has already.
        parts: (item, path, number) of parts of the others.
        nbytes: of all.
    """

    views: list[tuple[str, str]]
    parts: list[tuple[str, str, int]]
    nbytes: int


def to_copy(items: Mapping[str, Item], known: Callable[[str], Unchanged]) -> _Copied:
    """What `HeldItems` copies of these items, if it is given buffers.

    All NumPy arrays, since their owner may write to them. Of others those that take long to copy
    should they be donated: what is large, lies in the host's memory, and is to be written. Of what
    the last step stored a view is held until it is known that nothing is to be written.

    Args:
        items: as `prepare` gave them.
        known: gives what is known of an item over the saves of the run.
    """
    held = on_host()  # what comes from elsewhere is a copy already
    views, parts, sizes = [], [], []
    for name, item in items.items():
        same = known(name).same(item.given)
        for path, view in item.views.items():
            if view.nbytes >= LEAST_COPIED_BYTES and path not in same:
                views.append((name, path))
                sizes.append(view.nbytes)
        for path, found in item.transfers.sizes().items():
            always = item.transfers.is_numpy(path)
            for number, nbytes in enumerate(found):
                large = held and nbytes >= LEAST_COPIED_BYTES and path not in same
                if always or large:
                    parts.append((name, path, number))
                    sizes.append(nbytes)
    return _Copied(views, parts, places(sizes).nbytes)


def _with_copies(
    items: Mapping[str, Item],
    copied: _Copied,
    buffers: KeptBuffers,
    left: Collection[tuple[str, str]],
) -> tuple[dict[str, Item], dict[str, dict[str, HeldArray]]]:
    """The items without views of what is copied, and their other arrays, held unless left."""
    waited = _waited(items, left, copied=False)
    views = {name: dict(item.views) for name, item in items.items()}
    copies = iter(
        buffers.copies(
            [np.asarray(views[name][path]) for name, path in copied.views]
            + [waited[name][path].parts[number].values for name, path, number in copied.parts]
        )
    )
    for name, path in copied.views:
        views[name][path] = next(copies)
    for name, path, number in copied.parts:
        array = waited[name][path]
        parts = list(array.parts)
        parts[number] = parts[number]._replace(values=next(copies))
        waited[name][path] = array._replace(parts=tuple(parts))
    return {name: item._replace(views=views[name]) for name, item in items.items()}, waited


def _waited(
    items: Mapping[str, Item], left: Collection[tuple[str, str]], *, copied: bool = True
) -> dict[str, dict[str, HeldArray]]:
    """By item and path the arrays that no view is held of yet; those left have no parts."""
    return {
        name: item.transfers.wait(
            copied=copied, without={path for owner, path in left if owner == name}
        )
        for name, item in items.items()
    }


def _arrays(name: str, item: Item, waited: Mapping[str, HeldArray]) -> dict[str, HeldArray]:
    """What is stored of an item, in the order of its leaves."""
    columns = is_read_by_columns(name)
    others = {**waited, **{path: leaf.outline() for path, leaf in item.deferred.items()}}
    return {
        path: viewed(item.views[path], leaf.sharding, columns=columns)
        if path in item.views
        else others[path]
        for path, leaf in item.given.items()
        if path in item.views or path in others
    }


def _check_type(argument: str, found: object, kinds: tuple[type, ...], expected: str) -> None:
    if not isinstance(found, kinds):
        raise UnsupportedFormatError(
            "an argument of another type",
            path=argument,
            expected=expected,
            found=f"{type(found).__name__} {found!r}"[:200],
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


def _draft_leaves(
    name: str, item: Item, arrays: Mapping[str, HeldArray], compression: Compression | None
) -> list[LeafDraft]:
    """One draft per leaf."""
    packed = {
        path: packed_axis(form.shape, arrays[path].shape)
        for path, form in item.forms.items()
        if form.kind == "packed"
    }
    drafts = []
    for path, leaf in item.given.items():
        cut = arrays[path].cut if path in arrays else None
        if cut is not None and path in packed:
            cut = ChunkShapes(*(unpacked_shape(part, packed[path]) for part in cut))
        drafts.append(
            LeafDraft(
                item=name,
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
    drafts: Iterable[LeafDraft], shards: Mapping[tuple[str, str], Iterable[PlacedShard]]
) -> tuple[LeafRecord, ...]:
    """What is recorded of the leaves; of one that stores no array no shards and no chunks.

    Args:
        drafts: all leaves.
        shards: of the leaves that have any, by item and path.
    """
    return tuple(
        LeafRecord(
            item=draft.item,
            path=draft.path,
            shape=draft.shape,
            dtype=draft.dtype,
            spec=draft.spec,
            chunks=draft.cut.chunk if draft.cut else None,
            shards=draft.cut.shard if draft.cut else None,
            digest=digest_text(_total(shards.get((draft.item, draft.path), ()))),
            compression=draft.compression,
        )
        for draft in drafts
    )


def _total(shards: Iterable[PlacedShard]) -> int:
    """The digest of a leaf."""
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
    given = tuple(sharding.spec)
    padded = given + (None,) * (np.ndim(leaf) - len(given))
    return tuple(tuple(axes) if isinstance(axes, list | tuple) else axes for axes in padded)
