"""Read an item back into the caller's tree: resharded, strict, verified. Imports JAX.

Every process reads only what its own devices hold, in parallel, straight into the memory that
becomes the arrays. All differences between the target and what is stored are found first, from
metadata, and raised in one error; no value is handed out before all that were read are checked.
"""

import re
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import jax

from cairn.storage.arrays import META_ITEM
from cairn.storage.errors import CorruptionError, NotFoundError, TreeMismatchError
from cairn.storage.reading import (
    CheckpointReader,
    ItemArrays,
    LeafInfo,
    LeafReads,
)
from cairn.storage.runs import Manifest, manifest_file
from cairn.storage.store import ObjectStore, StoreURI, canonical_json, sha256_of
from cairn.storage.training import processes, trees
from cairn.storage.training.target_leaves import PlacedLeaf, TargetLeaf, target_leaf

__all__ = [
    "open_step",
    "read_meta",
    "restore_item",
    "restore_leaves",
    "stored_items",
    "stored_tree",
]

_STEP_FOLDER: Final = re.compile(r"attempts/([0-9]+)/([0-9]+)$")
_HOST_BYTES: Final = 1 << 30
"""Bytes of leaves that wait on the host for their transfer to devices other than the CPU's."""

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
    return {path: _logical(arrays, info) for path, info in arrays.infos().items()}


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
            next_step="Load another step; plain Orbax reads the arrays of this one.",
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
    leaves = restore_leaves(
        step, item, target, trees.paths(target), cast=cast, path_for_errors=path_for_errors
    )
    return trees.unflatten(target, leaves)


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
        StorageError: as `restore_item`.
    """
    where = path_for_errors or (step.uri if isinstance(step, CheckpointReader) else step)
    # What fails on one process fails on all: none may wait for another that has given up.
    arrays, infos, fitting = processes.together(lambda: _fitted(step, item, target, cast, where))
    wanted = {path: fitting[path] for path in paths}
    values = processes.together(lambda: _read(arrays, infos, wanted))
    return {path: wanted[path].finish(values[path]) for path in wanted}


def _opened(step: Step) -> CheckpointReader:
    return step if isinstance(step, CheckpointReader) else open_step(step)


def _manifest_of(step_uri: StoreURI) -> Manifest | None:
    """The manifest of a step that lies in a run as Cairn lays it out; None if there is none."""
    found = _STEP_FOLDER.search(step_uri.path)
    if found is None:
        return None
    run = step_uri.parent.parent.parent
    name = manifest_file(int(found[2]), int(found[1]))
    stored = ObjectStore.open(run).read(name)
    return None if stored is None else Manifest.parse(stored.value, run / name)


def _arrays(reader: CheckpointReader, item: str, where: object) -> ItemArrays:
    arrays = None if item == META_ITEM else reader.arrays(item)
    if arrays is None:
        raise NotFoundError(
            "no such item",
            path=where,
            expected=f"item {item!r} with a tree",
            found=f"items {', '.join(reader.names())}",
            next_step="Load one of these.",
        )
    return arrays


def _fitted(
    step: Step, item: str, target: Any, cast: bool, where: object
) -> tuple[ItemArrays, dict[str, LeafInfo], dict[str, TargetLeaf]]:
    """What is stored and what is wanted, if they fit."""
    arrays = _arrays(_opened(step), item, where)
    infos = arrays.infos()
    stored = {path: _logical(arrays, info) for path, info in infos.items()}
    wanted = {path: target_leaf(leaf) for path, leaf in trees.flatten(target).items()}
    problems = trees.difference(list(wanted), stored)
    for path in sorted(wanted.keys() & stored.keys()):
        problems += [f"{path}: {text}" for text in wanted[path].misfits(stored[path], cast)]
    if problems:
        raise TreeMismatchError(
            f"item {item!r} does not fit the target",
            path=where,
            expected=f"the {len(wanted)} leaves of the target",
            found=f"{len(stored)} stored leaves, {len(problems)} differences",
            next_step="Build the target as it was saved, or load another step.",
            problems=problems,
        )
    return arrays, infos, wanted


def _logical(arrays: ItemArrays, info: LeafInfo) -> jax.ShapeDtypeStruct:
    form = arrays.form(info.path)
    if form is not None and form.kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=form.dtype))
        return jax.ShapeDtypeStruct(form.shape, key.dtype)
    return jax.ShapeDtypeStruct(info.shape, info.dtype)


class _Filling(NamedTuple):
    """A leaf whose parts are being read."""

    path: str
    leaf: PlacedLeaf
    futures: list[Future[None]]
    nbytes: int


def _read(
    arrays: ItemArrays, infos: Mapping[str, LeafInfo], wanted: Mapping[str, TargetLeaf]
) -> dict[str, Any]:
    """The leaves by path, placed as the targets say, in the dtypes that they ask for."""
    values: dict[str, Any] = {}
    with ExitStack() as stack:
        reads = LeafReads(arrays)
        pool = stack.enter_context(ThreadPoolExecutor(reads.threads, "cairn-read"))
        filling: deque[_Filling] = deque()
        stack.callback(lambda: [future.cancel() for one in filling for future in one.futures])
        waiting = 0
        for path, target in wanted.items():
            info = infos[path]
            if info.chunks is None:
                values[path] = target.empty()
                continue
            leaf = PlacedLeaf(target, info)
            futures = [pool.submit(task) for task in reads.tasks(info, leaf.regions)]
            filling.append(_Filling(path, leaf, futures, info.nbytes))
            waiting += info.nbytes
            while filling and not leaf.stays and waiting > _HOST_BYTES:
                waiting -= filling[0].nbytes
                _finish(arrays, filling, values)
        while filling:
            _finish(arrays, filling, values)
    return values


def _finish(arrays: ItemArrays, filling: deque[_Filling], values: dict[str, Any]) -> None:
    """Wait for the first leaf's parts, and make it of them."""
    first = filling[0]
    for future in first.futures:
        future.result()
    filling.popleft()
    form = arrays.form(first.path)
    impl = form.dtype if form is not None and form.kind == "key" else None
    values[first.path] = first.leaf.value(key_impl=impl)
