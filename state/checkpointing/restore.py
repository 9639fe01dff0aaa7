"""Restore of an item into the caller's tree: resharded, strict, verified. Imports JAX.

Each process reads in parallel what its own devices will hold, straight into the memory of the
arrays. If several processes hold the same data, each reads a share, and they exchange the shares.
Target and stored tree are compared by their metadata before any read, and one error lists all
differences. Values are returned only after all of them are verified.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from pydantic import TypeAdapter, ValidationError

from cairn.counts import count_text
from cairn.state.checkpointing import trees
from cairn.state.checkpointing.gc_pause import pause_gc
from cairn.state.checkpointing.processes import agreement
from cairn.state.checkpointing.restores.local_leaves import read_leaves
from cairn.state.checkpointing.restores.shared_leaves import agreed_shared, read_shared
from cairn.state.checkpointing.restores.targets import Casts, TargetLeaf, target_leaf
from cairn.storage.arrays.orbax_tree import META_ITEM
from cairn.storage.errors import (
    CorruptionError,
    LeafNotFoundError,
    NotFoundError,
    TreeMismatchError,
)
from cairn.storage.reading.item_arrays import ItemArrays, LeafInfo
from cairn.storage.reading.reader import CheckpointReader, manifest_at
from cairn.storage.store.records import canonical_json, sha256_of
from cairn.storage.store.uri import StoreURI

__all__ = [
    "FittedItem",
    "check_meta",
    "fit_item",
    "fits_as",
    "open_step",
    "read_meta",
    "restore_item",
    "restore_leaves",
    "stored_items",
    "stored_tree",
]

Step = StoreURI | CheckpointReader


def open_step(step_uri: StoreURI) -> CheckpointReader:
    """Return a reader of a step; if the step is in a run, check its files against its manifest.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        CorruptionError: the metadata can't be read, or files differ from those that were saved.
        StoreUnavailableError: the store does not respond.
    """
    return CheckpointReader.open(step_uri, manifest_at(step_uri), whole=True)


def stored_items(step: Step) -> list[str]:
    """Return the names of a step's items.

    Args:
        step: the step's folder, or a reader of it.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
    """
    return _opened(step).names()


def stored_tree(step: Step, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype that every leaf of an item had when it was saved, by path.

    Args:
        step: the step's folder, or a reader of it.
        item: the item's name.

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
    """Return the JSON item ("meta") of a step.

    Args:
        step: the step's folder, or a reader of it.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        NotFoundError: the step has no JSON item.
        CorruptionError: the JSON differs from what was saved.
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
    digest = sha256_of(canonical_json(meta))
    if reader.meta_digest not in (None, digest):
        raise CorruptionError(
            "the JSON item changed",
            path=reader.uri / META_ITEM,
            expected=reader.meta_digest,
            found=digest,
            next_step="Load another step, or restore this file from a backup.",
        )
    return meta


def check_meta(meta: Any, fields: TypeAdapter[Any], *, path: StoreURI) -> None:
    """Check the JSON item of a step, or a part of it.

    Args:
        meta: the JSON.
        fields: its fields and their types.
        path: the step.

    Raises:
        CorruptionError: a field has another type; all such fields are listed.
    """
    try:
        fields.validate_python(meta)
    except ValidationError as exc:
        problems = [
            f"{'/'.join(map(str, error['loc']))}: {error['msg']}" for error in exc.errors()[:20]
        ]
        raise CorruptionError(
            "the meta of the step is damaged",
            path=path,
            expected="fields as the save wrote them",
            found="; ".join(problems),
            next_step="Load another step, or restore the file `meta` from a backup.",
        ) from exc


def restore_item(
    step: Step,
    item: str,
    target: Any,
    *,
    cast: bool = False,
    path_for_errors: object = None,
) -> Any:
    """Restore an item into the containers of `target`.

    Args:
        step: the step's folder, or a reader of it.
        item: the item's name, such as "model".
        target: a tree whose leaves say what is returned in their place. For a
            `jax.ShapeDtypeStruct` or a `jax.Array` it is an array of the same sharding (without
            one, on the first local device); for a NumPy array, a NumPy scalar or a Python number
            it is one of these.
        cast: allow floating leaves to change dtype; all other dtypes must be equal.
        path_for_errors: name of the checkpoint in errors about the target; None for the step's
            folder.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        NotFoundError: the step has no such item.
        TreeMismatchError: leaves are missing, unexpected, or of another shape or dtype, or a
            sharding does not divide its leaf; all are listed.
        CorruptionError: stored bytes fail their checksum; names the leaf or the file.
        StoreUnavailableError: the store does not respond.
    """
    with pause_gc():
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
    """Restore some leaves of an item, like `restore_item`, and return them by path.

    Args:
        step: the step's folder, or a reader of it.
        item: the item's name.
        target: the whole tree, as for `restore_item`; all of it must fit, not only these leaves.
        paths: paths of the leaves to restore.
        cast: allow floating leaves to change dtype.
        path_for_errors: name of the checkpoint in errors about the target.

    Raises:
        LeafNotFoundError: the target does not have some of the paths; all of these are listed.
        StorageError: for the reasons of `restore_item`.
    """
    where = path_for_errors or (step.uri if isinstance(step, CheckpointReader) else step)
    # An error on one process is raised on all: none may wait for one that has stopped.
    with pause_gc():
        return agreement.all_or_none(_fitted, step, item, target, paths, cast, where).read()


class FittedItem(NamedTuple):
    """Stored item and the target that it was compared with.

    Attributes:
        name: the item's name.
        arrays: the stored arrays.
        infos: description of each stored leaf, by path.
        targets: description of each leaf to return, by path.
        texts: stored leaves that are text, by path.
        problems: differences between target and item, one line each; `read` requires none.
        where: name of the checkpoint in errors.
    """

    name: str
    arrays: ItemArrays
    infos: dict[str, LeafInfo]
    targets: dict[str, TargetLeaf]
    texts: dict[str, str]
    problems: list[str]
    where: object

    def read(self) -> dict[str, Any]:
        """Read the leaves, convert them as the target says, and return them by path.

        All processes must call this: data that several of them hold is read by one of these.
        """
        shared = agreed_shared(self.infos, self.targets)
        alone = {path: leaf for path, leaf in self.targets.items() if path not in shared}
        values = agreement.all_or_none(read_leaves, self.arrays, self.infos, alone)
        values |= read_shared(self.arrays, self.infos, self.targets, shared)
        return {path: leaf.finish(values[path]) for path, leaf in self.targets.items()} | self.texts


def fit_item(
    reader: CheckpointReader,
    name: str,
    target: Any,
    *,
    casts: Casts,
    where: object,
    chosen: Callable[[str], object] | None = None,
) -> FittedItem:
    """Compare a stored item with a target by metadata; return both with the differences.

    Args:
        reader: reader of the step.
        name: the item's name.
        target: the target tree, as for `restore_item`.
        casts: which leaves may change dtype.
        where: name of the checkpoint in errors.
        chosen: predicate on paths that selects the leaves to compare and read; None for all.

    Raises:
        NotFoundError: the step has no such item.
        UnsupportedLeafError, TypeError: the target has leaves or keys that can't be restored.
    """
    arrays = _arrays(reader, name, where)
    leaves = trees.flatten(target)
    moved = {path: old for path, old in arrays.tree.variables.items() if old in leaves}
    infos = {
        moved.get(path, arrays.tree.current(path)): info for path, info in arrays.infos().items()
    }
    if chosen is not None:
        infos = {path: info for path, info in infos.items() if chosen(path)}
        leaves = {path: leaf for path, leaf in leaves.items() if chosen(path)}
    texts = {path: text for path, text in reader.texts(name).items() if not chosen or chosen(path)}
    text_paths = {path for path, leaf in leaves.items() if isinstance(leaf, str)} & {*texts, *infos}
    targets = {path: target_leaf(leaf) for path, leaf in leaves.items() if path not in text_paths}
    stored = {path: fits_as(arrays, info) for path, info in infos.items()}
    problems = trees.difference([*targets, *text_paths], {*stored, *texts})
    for path in sorted(targets.keys() & stored.keys()):
        problems += [f"{path}: {text}" for text in targets[path].misfits(stored[path], casts)]
    problems += [
        f"{path}: expected text, stored an array" for path in sorted(text_paths - {*texts})
    ]
    problems += [
        f"{path}: expected an array, stored text" for path in sorted({*targets} & {*texts})
    ]
    return FittedItem(name, arrays, infos, targets, texts, problems, where)


def _opened(step: Step) -> CheckpointReader:
    return step if isinstance(step, CheckpointReader) else open_step(step)


def _arrays(reader: CheckpointReader, item: str, where: object) -> ItemArrays:
    is_json = item == META_ITEM and not reader.is_adopted
    arrays = None if is_json else reader.arrays(item)
    if arrays is None and item in reader.names():
        place = f"meta()[{item!r}]" if item in reader.meta() else "meta()"
        raise NotFoundError(
            "the item is JSON",
            path=where,
            expected="an item with a tree",
            found=f"item {item!r}, which is JSON",
            next_step=f'Leave it out of the target; CheckpointReader.open("RUN/steps/N").{place} '
            "reads it.",
        )
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
    """Return a fitted item with only the leaves of these paths.

    Raises:
        LeafNotFoundError: the target lacks some of the paths, or `paths` is a single text.
    """
    selected = [paths] if isinstance(paths, str) else list(paths)
    unknown = [path for path in selected if path not in fitted.targets and path not in fitted.texts]
    if unknown or isinstance(paths, str):
        raise LeafNotFoundError(
            "no such leaves",
            path=f"{fitted.where}: item {fitted.name!r}",
            expected=f"a list of paths of its {len(fitted.targets)} leaves",
            found=repr(paths) if isinstance(paths, str) else ", ".join(map(repr, unknown)),
            next_step=f"Give paths such as {', '.join(map(repr, list(fitted.targets)[:3]))}.",
        )
    return fitted._replace(
        targets={path: fitted.targets[path] for path in selected if path in fitted.targets},
        texts={path: fitted.texts[path] for path in selected if path in fitted.texts},
    )


def _fitted(
    step: Step, item: str, target: Any, paths: Collection[str], cast: bool, where: object
) -> FittedItem:
    """Return the stored item, compared with the target, with only the leaves of these paths.

    Raises:
        TreeMismatchError: item and target differ.
        LeafNotFoundError: the target lacks some of the paths.
    """
    fitted = fit_item(_opened(step), item, target, casts="floats" if cast else "none", where=where)
    if fitted.problems:
        raise TreeMismatchError(
            f"item {item!r} does not fit the target",
            path=where,
            expected=f"the {count_text(len(fitted.targets), 'leaf')} of the target",
            found=f"{count_text(len(fitted.infos), 'stored leaf', 'stored leaves')}, "
            f"{count_text(len(fitted.problems), 'difference')}",
            next_step="Build the target as it was saved, or load another step.",
            problems=fitted.problems,
        )
    return _chosen(fitted, paths)


def fits_as(arrays: ItemArrays, info: LeafInfo) -> jax.ShapeDtypeStruct | LeafInfo:
    """Return an object with a leaf's shape and dtype; for typed PRNG keys, those of the keys."""
    form = arrays.form(info.path)
    return _logical(arrays, info) if form is not None and form.kind == "key" else info


def _logical(arrays: ItemArrays, info: LeafInfo) -> jax.ShapeDtypeStruct:
    form = arrays.form(info.path)
    if form is not None and form.kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=form.dtype))
        return jax.ShapeDtypeStruct(form.shape, key.dtype)
    return jax.ShapeDtypeStruct(info.shape, info.dtype)
