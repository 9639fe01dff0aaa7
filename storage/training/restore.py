"""Read an item back into the caller's tree: resharded, strict, verified. Imports JAX.

Every process reads only what its own devices hold, in parallel, straight into the memory that
becomes the arrays; of what several processes hold each reads a share, and they exchange them. All
differences between the target and what is stored are found first, from metadata, and raised in one
error; no value is handed out before all that were read are checked.
"""

import functools
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from cairn.storage.arrays import (
    ALIGNMENT,
    META_ITEM,
    Index,
    Region,
    SmallArrays,
    aligned_empty,
    origin_of,
)
from cairn.storage.errors import (
    CorruptionError,
    LeafNotFoundError,
    NotFoundError,
    TreeMismatchError,
)
from cairn.storage.reading import (
    HOST_BYTES,
    CheckpointReader,
    ItemArrays,
    LeafInfo,
    LeafReads,
    WholeChunk,
)
from cairn.storage.runs import Manifest, manifest_file, read_record
from cairn.storage.store import ObjectStore, StoreURI, canonical_json, sha256_of
from cairn.storage.training import processes, trees
from cairn.storage.training.garbage import no_collections
from cairn.storage.training.leaf_forms import dtype_name, is_key_dtype, why_no_plain_array
from cairn.storage.training.read_plan import Part, SharedLeaf, batches, shared_parts
from cairn.storage.training.weak_types import weakly_typed

__all__ = [
    "FittedItem",
    "PlacedLeaf",
    "TargetLeaf",
    "fit_item",
    "open_step",
    "read_meta",
    "restore_item",
    "restore_leaves",
    "stored_items",
    "stored_tree",
    "target_leaf",
]

_KINDS: dict[type, tuple[str, str]] = {
    bool: ("b", "a Python bool"),
    int: ("iu", "a Python int"),
    float: ("f", "a Python float"),
    complex: ("fc", "a Python complex"),
}


class TargetLeaf(NamedTuple):
    """One leaf of a target.

    Attributes:
        shape: wanted shape.
        dtype: wanted dtype; None for Python numbers, which take any dtype of their kind.
        sharding: where to put it; None for leaves that stay on the host.
        scalar: the type of scalar to make (Python's or NumPy's); None for arrays.
        committed: False if JAX may move it to where other arguments of a computation are.
        weak: the array gives way to the dtypes of others, as one made of a Python number does.
    """

    shape: tuple[int, ...]
    dtype: Any
    sharding: jax.sharding.Sharding | None
    scalar: type | None
    committed: bool = True
    weak: bool = False

    def misfits(self, stored: jax.ShapeDtypeStruct | LeafInfo, cast: bool) -> list[str]:
        """Why a leaf of this shape and dtype can't be restored here; nothing if it can."""
        problems = []
        if tuple(stored.shape) != self.shape:
            problems.append(f"expected shape {self.shape}, stored {tuple(stored.shape)}")
        elif isinstance(getattr(self.sharding, "mesh", None), jax.sharding.AbstractMesh):
            problems.append(
                "expected a sharding on devices, found one on an AbstractMesh, which has none "
                "(jax.eval_shape makes such of explicit axes); give it one on the Mesh itself"
            )
        elif self.sharding is not None:
            try:
                if not isinstance(self.sharding, jax.sharding.SingleDeviceSharding):
                    _places(self.sharding, self.shape)
            except ValueError as exc:
                problems.append(f"shape {self.shape} does not fit its sharding: {exc}")
        if not self._takes(stored.dtype, cast):
            wanted = _KINDS[self.scalar][1] if self.dtype is None and self.scalar else None
            expected = wanted or f"dtype {dtype_name(self.dtype)}"
            problems.append(f"expected {expected}, stored dtype {dtype_name(stored.dtype)}")
        elif self.sharding is not None and not is_key_dtype(self.dtype):
            made = _made_of(self.dtype)
            if made != self.dtype:
                problems.append(
                    f"expected dtype {dtype_name(self.dtype)}, of which JAX makes "
                    f"{dtype_name(made)}; set jax_enable_x64 for the whole process, or restore "
                    "it as a NumPy array"
                )
        return problems

    def _takes(self, dtype: Any, cast: bool) -> bool:
        if self.dtype is None and self.scalar is not None:
            return not is_key_dtype(dtype) and np.dtype(dtype).kind in _KINDS[self.scalar][0]
        if self.dtype == dtype:
            return True
        return cast and _is_floating(dtype) and _is_floating(self.dtype)

    def empty(self) -> Any:
        """The leaf, if it has no elements."""
        nothing = np.zeros(self.shape, self.dtype)
        if self.sharding is None:
            return nothing
        return self.place(self.shape, self.dtype, lambda index: nothing[index])

    def place(self, shape: tuple[int, ...], dtype: Any, part: Callable[[Any], Any]) -> jax.Array:
        """The array of JAX, on its devices; without a copy, where one is not needed.

        Args:
            shape: of the whole; of typed keys that of their words.
            dtype: its dtype.
            part: gives what lies at an index of it.
        """
        assert self.sharding is not None
        if self.committed:
            return jax.make_array_from_callback(shape, self.sharding, part, dtype=dtype)
        (device,) = self.sharding.device_set
        with jax.default_device(device):
            return jnp.asarray(part((slice(None),) * len(shape)), dtype)

    def finish(self, value: Any) -> Any:
        """`value`, read in logical dtype, as the type that was asked for."""
        if self.scalar is not None:
            item = np.asarray(value)[()]
            return self.scalar(item) if self.dtype is None else item
        if self.sharding is None and self.dtype is not None:
            return np.asarray(value).astype(self.dtype, copy=False)
        value = value if value.dtype == self.dtype else value.astype(self.dtype)
        return weakly_typed(value) if self.weak else value


class PlacedLeaf:
    """A leaf being read: the parts of it that this process holds, and what is made of them.

    Attributes:
        regions: the parts, to be filled with the stored elements.
        stays: the memory of the parts becomes the leaf's; it need not be moved to other devices.
    """

    def __init__(self, target: TargetLeaf, info: LeafInfo, memory: SmallArrays) -> None:
        """Make room for them.

        Args:
            target: what to make; it fits what is stored.
            info: what is stored.
            memory: where small parts lie that become arrays of JAX.
        """
        self._target = target
        self._dtype = info.dtype if is_key_dtype(target.dtype) else target.dtype
        self._shape = info.shape  # of typed keys: of their words
        if target.sharding is None:
            origins: Sequence[Index] = ((0,) * len(info.shape),)
            values, self.stays = aligned_empty([info.shape], info.dtype), True
        else:
            part, origins, self.stays = _places(target.sharding, info.shape)
            values = [memory.empty(part, info.dtype) for _ in origins]
        self.regions = [Region(*one) for one in zip(origins, values, strict=True)]

    def value(self, *, key_impl: str | None) -> Any:
        """The leaf, in the dtype that the target asks for, once its regions are filled.

        Args:
            key_impl: of a leaf of typed PRNG keys: their implementation.
        """
        dtype, sharding = self._target.dtype, self._target.sharding
        whole: Any
        parts = [region.values for region in self.regions]
        if key_impl is None and dtype is not None and parts[0].dtype != dtype:
            parts = [part.astype(dtype) for part in parts]
        if sharding is None:
            (whole,) = parts
        else:
            origins = (region.origin for region in self.regions)
            by_origin = dict(zip(origins, parts, strict=True))
            (only,) = parts if len(parts) == 1 else (None,)
            whole = self._target.place(
                self._shape,
                self._dtype,
                lambda index: by_origin[origin_of(index)] if only is None else only,
            )
        return whole if key_impl is None else jax.random.wrap_key_data(whole, impl=key_impl)


class _Places(NamedTuple):
    """Where the parts of an array lie.

    Attributes:
        part: shape of each.
        origins: index of the first element of each that this process holds.
        on_cpu: all of its devices are CPUs.
    """

    part: tuple[int, ...]
    origins: tuple[tuple[int, ...], ...]
    on_cpu: bool


@functools.lru_cache(maxsize=4096)
def _places(sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> _Places:
    """The parts of this process.

    Raises:
        ValueError: the sharding does not divide the shape.
    """
    part = sharding.shard_shape(shape)
    places: Mapping[Any, Any] = sharding.addressable_devices_indices_map(shape)
    origins = dict.fromkeys(origin_of(index) for index in places.values())
    return _Places(part, tuple(origins), {device.platform for device in places} == {"cpu"})


@functools.lru_cache(maxsize=256)
def _dtype_of_jax(dtype: Any, x64: bool) -> Any:
    return jax.dtypes.canonicalize_dtype(dtype)


def _made_of(dtype: Any) -> Any:
    """The dtype that JAX makes of this one, as it is configured now."""
    return _dtype_of_jax(dtype, bool(jax.config.read("jax_enable_x64")))


def _is_floating(dtype: Any) -> bool:
    return not is_key_dtype(dtype) and bool(jnp.issubdtype(dtype, jnp.floating))


def target_leaf(leaf: Any) -> TargetLeaf:
    """What the leaf of a target asks for.

    Raises:
        TypeError: it is neither an array, a description of one, nor a number.
    """
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        sharding, committed = leaf.sharding, not isinstance(leaf, jax.Array) or leaf.committed
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
            committed = False
        weak = bool(getattr(leaf, "weak_type", False))  # typed keys know nothing of it
        return TargetLeaf(tuple(leaf.shape), _native(leaf.dtype), sharding, None, committed, weak)
    if isinstance(leaf, np.ndarray):
        reason = why_no_plain_array(leaf)
        if reason is not None:
            raise TypeError(f"a restore target's leaf: {reason}")
        return TargetLeaf(leaf.shape, _native(leaf.dtype), None, None)
    if isinstance(leaf, np.generic):
        return TargetLeaf((), leaf.dtype, None, type(leaf))
    if type(leaf) in _KINDS:
        return TargetLeaf((), None, None, type(leaf))
    raise TypeError(
        f"a restore target's leaf is {type(leaf).__name__}: expected jax.ShapeDtypeStruct, "
        "jax.Array, a NumPy array or scalar, or a Python number"
    )


def _native(dtype: Any) -> Any:
    """The dtype in this machine's byte order, in which everything is stored."""
    return dtype if is_key_dtype(dtype) else np.dtype(dtype).newbyteorder("=")


_STEP_FOLDER: Final = re.compile(r"attempts/([0-9]+)/([0-9]+)$")
_CHUNKS_AT_ONCE: Final = 512

READ_ONCE: Final = "CAIRN_READ_ONCE"
"""Environment variable: 0 lets each process read all that its devices hold."""

BATCH_BYTES: Final = 128 << 20
"""What a process has at a time of parts that are read for several, beside the leaves."""

Step = StoreURI | CheckpointReader


def open_step(step_uri: StoreURI) -> CheckpointReader:
    """The reader of a step, its files checked against the step's manifest if it lies in a run.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        CorruptionError: the metadata can't be read, or files are not what was saved.
        StoreUnavailableError: the store gives no answer.
    """
    return CheckpointReader.open(step_uri, _manifest_of(step_uri))


def stored_items(step: Step) -> list[str]:
    """Names of the items of a step.

    Args:
        step: its folder, or a reader of it.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
    """
    return _opened(step).names()


def stored_tree(step: Step, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Logical shape and dtype of every leaf of an item, by path.

    Args:
        step: its folder, or a reader of it.
        item: its name.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        NotFoundError: the step has no such item.
        CorruptionError: the metadata can't be read.
    """
    arrays = _arrays(_opened(step), item, step)
    infos = arrays.infos()
    return {arrays.tree.current(path): _logical(arrays, info) for path, info in infos.items()}


def read_meta(step: Step) -> dict[str, Any]:
    """The JSON item of a step.

    Args:
        step: its folder, or a reader of it.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        NotFoundError: the step has no JSON item.
        CorruptionError: the JSON is not what was saved.
    """
    reader = _opened(step)
    if META_ITEM not in reader.names():
        raise NotFoundError(
            "the step has no JSON item",
            path=reader.uri,
            expected=f"an item {META_ITEM!r}",
            found=f"items {', '.join(reader.names())}",
            next_step="Load another step; `cairn.load` reads the arrays of this one.",
        )
    meta = reader.meta()
    found = sha256_of(canonical_json(meta))
    if reader.meta_digest not in (None, found):
        raise CorruptionError(
            "the JSON item changed",
            path=reader.uri / META_ITEM,
            expected=reader.meta_digest,
            found=found,
            next_step="Load another step, or restore this file from a backup.",
        )
    return meta


def restore_item(
    step: Step,
    item: str,
    target: Any,
    *,
    cast: bool = False,
    path_for_errors: object = None,
) -> Any:
    """The item, in the containers of `target`.

    Args:
        step: the step's folder, or a reader of it.
        item: its name, such as "model".
        target: a tree whose leaves say what to make: `jax.ShapeDtypeStruct` or `jax.Array` (an
            array of that sharding; none means the first local device), NumPy arrays and scalars,
            Python numbers.
        cast: floating leaves may change dtype; all else must be equal.
        path_for_errors: what errors about the target call the checkpoint; default: its folder.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        NotFoundError: the step has no such item.
        TreeMismatchError: leaves are missing, unexpected, or of another shape or dtype, or a
            sharding does not divide its leaf; all are listed.
        CorruptionError: stored bytes fail their check; names the leaf or the file.
        StoreUnavailableError: the store gives no answer.
    """
    with no_collections():
        paths = trees.paths(target)
        leaves = restore_leaves(
            step, item, target, paths, cast=cast, path_for_errors=path_for_errors
        )
        return jax.tree.unflatten(jax.tree.structure(target), [leaves[path] for path in paths])


def restore_leaves(
    step: Step,
    item: str,
    target: Any,
    paths: Collection[str],
    *,
    cast: bool = False,
    path_for_errors: object = None,
) -> dict[str, Any]:
    """Some leaves of an item by path, as `restore_item` would give them; no others are read.

    Args:
        step: the step's folder, or a reader of it.
        item: its name.
        target: the whole tree, as `restore_item` takes it; it must fit as a whole.
        paths: which leaves.
        cast: floating leaves may change dtype.
        path_for_errors: what errors about the target call the checkpoint.

    Raises:
        LeafNotFoundError: paths that the target does not have; all are listed.
        StorageError: as `restore_item`.
    """
    where = path_for_errors or (step.uri if isinstance(step, CheckpointReader) else step)
    # What fails on one process fails on all: none may wait for another that has given up.
    with no_collections():
        fitted = processes.together(
            lambda: _chosen(_fitted(step, item, target, cast, where), paths)
        )
        return fitted.read()


class FittedItem(NamedTuple):
    """An item beside a target.

    Attributes:
        name: of the item.
        arrays: what is stored.
        infos: what is known of each stored leaf, by path.
        wanted: what to make of them, by path.
        texts: leaves that are text, by path.
        problems: where the two differ, a line each; nothing can be read before there are none.
        where: what errors call the checkpoint.
    """

    name: str
    arrays: ItemArrays
    infos: dict[str, LeafInfo]
    wanted: dict[str, TargetLeaf]
    texts: dict[str, str]
    problems: list[str]
    where: object

    def read(self) -> dict[str, Any]:
        """The wanted leaves by path, as the target says; all processes must call this.

        What several processes hold one of them reads, for all of them.
        """
        shared = _agreed_shared(self)
        alone = {path: leaf for path, leaf in self.wanted.items() if path not in shared}
        values = processes.together(lambda: _read(self.arrays, self.infos, alone))
        values |= _read_shared(self, shared)
        return {path: leaf.finish(values[path]) for path, leaf in self.wanted.items()} | self.texts


def fit_item(
    reader: CheckpointReader,
    name: str,
    target: Any,
    *,
    cast: bool,
    where: object,
    chosen: Callable[[str], object] | None = None,
) -> FittedItem:
    """Holds what is stored of an item against the target; reads no values.

    Args:
        reader: of the step.
        name: of the item.
        target: its tree, as `restore_item` takes it.
        cast: floating leaves may change dtype.
        where: what errors call the checkpoint.
        chosen: says of a path whether its leaf is wanted; others may differ. Default: all are.

    Raises:
        NotFoundError: the step has no such item.
        UnsupportedLeafError, TypeError: the target has leaves or keys that nothing is restored to.
    """
    arrays = _arrays(reader, name, where)
    leaves = trees.flatten(target)
    moved = {path: old for path, old in arrays.tree.variables.items() if old in leaves}
    known = {
        moved.get(path, arrays.tree.current(path)): info for path, info in arrays.infos().items()
    }
    if chosen is not None:
        known = {path: info for path, info in known.items() if chosen(path)}
        leaves = {path: leaf for path, leaf in leaves.items() if chosen(path)}
    texts = {path: text for path, text in reader.texts(name).items() if not chosen or chosen(path)}
    asked = {path for path, leaf in leaves.items() if isinstance(leaf, str)} & {*texts, *known}
    wanted = {path: target_leaf(leaf) for path, leaf in leaves.items() if path not in asked}
    stored = {path: _fits_as(arrays, info) for path, info in known.items()}
    problems = trees.difference([*wanted, *asked], {*stored, *texts})
    for path in sorted(wanted.keys() & stored.keys()):
        problems += [f"{path}: {text}" for text in wanted[path].misfits(stored[path], cast)]
    problems += [f"{path}: expected text, stored an array" for path in sorted(asked - {*texts})]
    problems += [f"{path}: expected an array, stored text" for path in sorted({*wanted} & {*texts})]
    return FittedItem(name, arrays, known, wanted, texts, problems, where)


def _opened(step: Step) -> CheckpointReader:
    return step if isinstance(step, CheckpointReader) else open_step(step)


def _manifest_of(step_uri: StoreURI) -> Manifest | None:
    """The manifest of a step that lies in a run as Cairn lays it out; None if there is none."""
    found = _STEP_FOLDER.search(step_uri.path)
    if found is None:
        return None
    name = manifest_file(int(found[2]), int(found[1]))
    stored = read_record(ObjectStore.open(step_uri.parent.parent.parent), name, Manifest)
    return None if stored is None else stored[0]


def _arrays(reader: CheckpointReader, item: str, where: object) -> ItemArrays:
    is_json = item == META_ITEM and not reader.is_adopted
    arrays = None if is_json else reader.arrays(item)
    if arrays is None:
        raise NotFoundError(
            "no such item",
            path=where,
            expected=f"item {item!r} with a tree",
            found=f"items {', '.join(reader.names())}",
            next_step="Load one of these.",
        )
    return arrays


def _chosen(fitted: FittedItem, paths: Collection[str]) -> FittedItem:
    """Of what fits, the leaves that are asked for."""
    asked = [paths] if isinstance(paths, str) else list(paths)
    unknown = [path for path in asked if path not in fitted.wanted and path not in fitted.texts]
    if unknown or isinstance(paths, str):
        raise LeafNotFoundError(
            "no such leaves",
            path=f"{fitted.where}: item {fitted.name!r}",
            expected=f"a list of paths of its {len(fitted.wanted)} leaves",
            found=repr(paths) if isinstance(paths, str) else ", ".join(map(repr, unknown)),
            next_step=f"Give paths such as {', '.join(map(repr, list(fitted.wanted)[:3]))}.",
        )
    return fitted._replace(
        wanted={path: fitted.wanted[path] for path in asked if path in fitted.wanted},
        texts={path: fitted.texts[path] for path in asked if path in fitted.texts},
    )


def _fitted(step: Step, item: str, target: Any, cast: bool, where: object) -> FittedItem:
    """What is stored and what is wanted, if they fit."""
    fitted = fit_item(_opened(step), item, target, cast=cast, where=where)
    if fitted.problems:
        raise TreeMismatchError(
            f"item {item!r} does not fit the target",
            path=where,
            expected=f"the {len(fitted.wanted)} leaves of the target",
            found=f"{len(fitted.infos)} stored leaves, {len(fitted.problems)} differences",
            next_step="Build the target as it was saved, or load another step.",
            problems=fitted.problems,
        )
    return fitted


def _fits_as(arrays: ItemArrays, info: LeafInfo) -> jax.ShapeDtypeStruct | LeafInfo:
    """What tells the logical shape and dtype of a leaf."""
    form = arrays.form(info.path)
    return _logical(arrays, info) if form is not None and form.kind == "key" else info


def _logical(arrays: ItemArrays, info: LeafInfo) -> jax.ShapeDtypeStruct:
    form = arrays.form(info.path)
    if form is not None and form.kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=form.dtype))
        return jax.ShapeDtypeStruct(form.shape, key.dtype)
    return jax.ShapeDtypeStruct(info.shape, info.dtype)


class _Filling(NamedTuple):
    """A leaf whose parts are being read."""

    path: str
    info: LeafInfo
    leaf: PlacedLeaf
    futures: list[Future[None]]


def _read(
    arrays: ItemArrays, infos: Mapping[str, LeafInfo], wanted: Mapping[str, TargetLeaf]
) -> dict[str, Any]:
    """The leaves by path, placed as the targets say, in the dtypes that they ask for."""
    values: dict[str, Any] = {}
    memory = SmallArrays()
    with ExitStack() as stack:
        arrays.prefetch(infos[path].path for path in wanted)
        reads = LeafReads(arrays)
        pool = stack.enter_context(ThreadPoolExecutor(reads.threads, "cairn-read"))
        filling: deque[_Filling] = deque()
        stack.callback(lambda: [future.cancel() for one in filling for future in one.futures])
        small: list[_Filling] = []
        chunks: list[WholeChunk] = []
        waiting = 0
        for path, target in wanted.items():
            info = infos[path]
            if info.chunks is None:
                values[path] = target.empty()
                continue
            leaf = PlacedLeaf(target, info, memory)
            whole = reads.whole_chunks(info, leaf.regions)
            if whole is not None:
                small.append(_Filling(path, info, leaf, []))
                chunks += whole
                if len(chunks) >= _CHUNKS_AT_ONCE:
                    _finish_small(reads, arrays, small, chunks, values)
                    small, chunks = [], []
                continue
            futures = [pool.submit(task) for task in reads.tasks(info, leaf.regions)]
            filling.append(_Filling(path, info, leaf, futures))
            waiting += info.nbytes
            while filling and not leaf.stays and waiting > HOST_BYTES:
                waiting -= filling[0].info.nbytes
                _finish(arrays, filling, values)
        _finish_small(reads, arrays, small, chunks, values)
        while filling:
            _finish(arrays, filling, values)
    return values


def _agreed_shared(fitted: FittedItem) -> dict[str, SharedLeaf]:
    """The leaves of which several processes hold the same; none unless all see the same ones."""
    if jax.process_count() == 1:
        return {}
    shared = processes.together(lambda: _shared(fitted))
    said = None if os.environ.get(READ_ONCE) == "0" else sha256_of(repr(shared).encode())
    heard = {*processes.collect(said)}
    return shared if said is not None and heard == {said} else {}


def _shared(fitted: FittedItem) -> dict[str, SharedLeaf]:
    found = {}
    for path, target in fitted.wanted.items():
        info, sharding = fitted.infos[path], target.sharding
        if info.chunks is None or sharding is None or sharding.is_fully_addressable:
            continue
        slices = processes.holders_of_slices(sharding, info.shape)
        if any(len(holders) > 1 for holders in slices.values()):
            shape = sharding.shard_shape(info.shape)
            found[path] = SharedLeaf(path, info.dtype.itemsize, info.chunks, shape, slices)
    return found


def _read_shared(fitted: FittedItem, shared: Mapping[str, SharedLeaf]) -> dict[str, Any]:
    """The leaves that several processes hold, of which each reads a share."""
    values: dict[str, Any] = {}
    filling: dict[str, _Filling] = {}
    memory = SmallArrays()
    parts = shared_parts(shared.values())
    last = {part.path: part for part in parts}

    def share(batch: Sequence[Part], streams: Mapping[tuple[int, ...], _Streams]) -> None:
        for members in sorted(streams):
            if len(members) > 1:
                processes.gather_bytes(members, [*streams[members].bytes.values()])
        for part in batch:
            one = filling.get(part.path)
            if one is None:
                info = fitted.infos[part.path]
                leaf = PlacedLeaf(fitted.wanted[part.path], info, memory)
                one = filling[part.path] = _Filling(part.path, info, leaf, [])
            if part.holders in streams:
                _put(one.leaf.regions, part, streams[part.holders].parts[part])
            if last[part.path] is part:
                values[part.path] = _made(fitted.arrays, filling.pop(part.path))

    def take(batch: Sequence[Part]) -> None:
        # A collective waits for all without a deadline: it begins once each has what it gives.
        streams = processes.together(lambda: _read_streams(fitted, batch))
        processes.together(lambda: share(batch, streams))

    for batch in batches(parts, BATCH_BYTES):
        take(batch)
    return values


class _Streams(NamedTuple):
    """What some processes give each other of a batch.

    Attributes:
        bytes: of each of them, in their order.
        parts: where in them each part is.
    """

    bytes: dict[int, np.ndarray[Any, Any]]
    parts: dict[Part, np.ndarray[Any, Any]]


def _read_streams(fitted: FittedItem, batch: Sequence[Part]) -> dict[tuple[int, ...], _Streams]:
    """Room for what this process holds of a batch, by holders; what it is to read is there."""
    me = int(jax.process_index())
    mine = [part for part in batch if me in part.holders]
    sizes: dict[tuple[int, ...], dict[int, int]] = {}
    starts: dict[Part, int] = {}
    for part in mine:
        size = sizes.setdefault(part.holders, dict.fromkeys(part.holders, 0))
        starts[part] = size[part.reader]
        size[part.reader] += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
    streams = {}
    for holders, size in sizes.items():
        made = aligned_empty([(count,) for count in size.values()], np.dtype(np.uint8))
        streams[holders] = _Streams(dict(zip(size, made, strict=True)), {})
    reads = LeafReads(fitted.arrays)
    tasks: list[Callable[[], None]] = []
    fitted.arrays.prefetch(
        dict.fromkeys(fitted.infos[part.path].path for part in mine if part.reader == me)
    )
    for part, start in starts.items():
        info, stream = fitted.infos[part.path], streams[part.holders]
        stored = stream.bytes[part.reader][start : start + part.nbytes]
        stream.parts[part] = stored.view(info.dtype).reshape(part.shape)
        if part.reader == me:
            tasks += reads.tasks(info, [Region(part.origin, stream.parts[part])])
    with ThreadPoolExecutor(reads.threads, "cairn-read") as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()
    return streams


def _put(regions: Sequence[Region], part: Part, values: np.ndarray[Any, Any]) -> None:
    """Copy a part into its slice."""
    (region,) = (one for one in regions if one.origin == part.within)
    starts = [at - first for at, first in zip(part.origin, part.within, strict=True)]
    box = tuple(slice(at, at + size) for at, size in zip(starts, part.shape, strict=True))
    region.part(box)[...] = values


def _finish_small(
    reads: LeafReads,
    arrays: ItemArrays,
    small: list[_Filling],
    chunks: list[WholeChunk],
    values: dict[str, Any],
) -> None:
    """Read many small leaves here: to hand them to other threads takes longer."""
    reads.read_whole(chunks)
    for one in small:
        values[one.path] = _made(arrays, one)


def _finish(arrays: ItemArrays, filling: deque[_Filling], values: dict[str, Any]) -> None:
    """Wait for the first leaf's parts, and make it of them."""
    first = filling[0]
    for future in first.futures:
        future.result()
    filling.popleft()
    values[first.path] = _made(arrays, first)


def _made(arrays: ItemArrays, one: _Filling) -> Any:
    """The leaf, whose parts are filled."""
    form = arrays.form(one.info.path)
    return one.leaf.value(key_impl=form.dtype if form is not None and form.kind == "key" else None)
