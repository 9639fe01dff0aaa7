"""Read an item back into the caller's tree: resharded, strict, verified. Imports JAX and Orbax.

Every process reads only the slices that its own devices hold. All differences between the target
and what is stored are found first, from metadata, and raised in one error.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from storage import processes, trees
from storage.errors import (
    CorruptionError,
    NotACheckpointError,
    NotFoundError,
    StepNotFoundError,
    StorageError,
    StoreUnavailableError,
    TreeMismatchError,
    translate,
)
from storage.leaf_forms import LeafForm, dtype_name, restore_form
from storage.objects import ObjectStore
from storage.orbax_save import CUSTOM_KEY, META_ITEM, meta_digest, orbax_folder
from storage.orbax_tree import STEP_METADATA, parse_json_object
from storage.reader import CheckpointReader
from storage.target_leaves import TargetLeaf, target_leaf
from storage.uri import StoreURI

__all__ = ["read_meta", "restore_item", "restore_leaves", "stored_items", "stored_tree"]

_META_FILE: Final = f"{META_ITEM}/data.json"
_LEAF_IN_TEXT: Final = re.compile(r'"([^"\s]+?)/(?:c(?:/\d+)*|zarr\.json)"')


class _Stored(NamedTuple):
    """What the metadata of one item says.

    Attributes:
        structure: Orbax's tree of the item, to be filled with abstract leaves.
        paths: the path of each leaf of `structure`, in order.
        leaves: logical shape and dtype by path, those without data included.
        forms: of the leaves stored differently, by path.
        shapes: as stored, by path.
    """

    structure: Any
    paths: list[str]
    leaves: dict[str, jax.ShapeDtypeStruct]
    forms: dict[str, LeafForm]
    shapes: dict[str, tuple[int, ...]]


def stored_items(step_uri: StoreURI) -> list[str]:
    """Names of the items of a step.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
    """
    handlers, custom = _step_metadata(step_uri, step_uri)
    return sorted(set(handlers) | set(custom.get("items", ())))


def stored_tree(step_uri: StoreURI, item: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Logical shape and dtype of every leaf of an item, by path.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        NotFoundError: the step has no such item.
        CorruptionError: the metadata can't be read.
    """
    return _stored(step_uri, item, step_uri).leaves


def read_meta(step_uri: StoreURI) -> dict[str, Any]:
    """The JSON item of a step.

    Raises:
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        NotFoundError: the step has no JSON item.
        CorruptionError: the JSON is not what was saved.
    """
    _, custom = _step_metadata(step_uri, step_uri)
    found = ObjectStore.open(step_uri).read(_META_FILE)
    if found is None:
        raise NotFoundError(
            "the step has no JSON item",
            path=step_uri,
            expected=_META_FILE,
            found="none",
            next_step="Load another step; plain Orbax reads the arrays of this one.",
        )
    meta = parse_json_object(found.value, path=step_uri / _META_FILE)
    expected = custom.get("meta_digest")
    if expected not in (None, meta_digest(meta)):
        raise CorruptionError(
            "the JSON item changed",
            path=step_uri / _META_FILE,
            expected=expected,
            found=meta_digest(meta),
            next_step="Load another step, or restore this file from a backup.",
        )
    return meta


def restore_item(
    step_uri: StoreURI,
    item: str,
    target: Any,
    *,
    cast: bool = False,
    path_for_errors: object = None,
) -> Any:
    """The item, in the containers of `target`.

    Args:
        step_uri: the step's folder.
        item: its name, such as "model".
        target: a tree whose leaves say what to make: `jax.ShapeDtypeStruct` or `jax.Array` (an
            array of that sharding; none means the first local device), NumPy arrays and scalars,
            Python numbers.
        cast: floating leaves may change dtype; all else must be equal.
        path_for_errors: what errors call the checkpoint; default `step_uri`.

    Raises:
        InvalidURIError: a store that Orbax can't read: neither a disk nor GCS.
        StepNotFoundError: there is no such folder.
        NotACheckpointError: the folder holds no committed Orbax checkpoint.
        NotFoundError: the step has no such item.
        TreeMismatchError: leaves are missing, unexpected, or of another shape or dtype, or a
            sharding does not divide its leaf; all are listed.
        CorruptionError: stored bytes fail their check; names the leaf.
    """
    leaves = restore_leaves(
        step_uri, item, target, trees.paths(target), cast=cast, path_for_errors=path_for_errors
    )
    return trees.unflatten(target, leaves)


def restore_leaves(
    step_uri: StoreURI,
    item: str,
    target: Any,
    paths: Collection[str],
    *,
    cast: bool = False,
    path_for_errors: object = None,
) -> dict[str, Any]:
    """Some leaves of an item by path, as `restore_item` would give them; no others are read.

    Args:
        step_uri: the step's folder.
        item: its name.
        target: the whole tree, as `restore_item` takes it; it must fit as a whole.
        paths: which leaves.
        cast: floating leaves may change dtype.
        path_for_errors: what errors call the checkpoint.

    Raises:
        StorageError: as `restore_item`.
    """
    where = step_uri if path_for_errors is None else path_for_errors
    # What fails on one process fails on all: none may wait for another that has given up.
    stored, fitting = processes.together(lambda: _fitted(step_uri, item, target, cast, where))
    wanted = {path: fitting[path] for path in paths}
    values = processes.together(lambda: _read(step_uri, item, stored, wanted, where))
    return {path: wanted[path].finish(values[path]) for path in wanted}


def _fitted(
    step_uri: StoreURI, item: str, target: Any, cast: bool, where: object
) -> tuple[_Stored, dict[str, TargetLeaf]]:
    """What is stored and what is wanted, if they fit."""
    stored = _stored(step_uri, item, where)
    wanted = {path: target_leaf(leaf) for path, leaf in trees.flatten(target).items()}
    problems = trees.difference(list(wanted), stored.leaves)
    for path in sorted(wanted.keys() & stored.leaves.keys()):
        problems += [f"{path}: {text}" for text in wanted[path].misfits(stored.leaves[path], cast)]
    if problems:
        raise TreeMismatchError(
            f"item {item!r} does not fit the target",
            path=where,
            expected=f"the {len(wanted)} leaves of the target",
            found=f"{len(stored.leaves)} stored leaves, {len(problems)} differences",
            next_step="Build the target as it was saved, or load another step.",
            problems=problems,
        )
    return stored, wanted


def _read(
    step_uri: StoreURI,
    item: str,
    stored: _Stored,
    wanted: Mapping[str, TargetLeaf],
    where: object,
) -> dict[str, Any]:
    """The leaves by path, in their logical dtypes, placed as the targets say."""
    values: dict[str, Any] = {}
    read = [path for path in stored.paths if path in wanted]
    if read:
        with _mapped(where, item, read):
            asked = {
                path: wanted[path].abstract(
                    stored.leaves[path], stored.forms.get(path), stored.shapes[path]
                )
                for path in read
            }
            abstract = [asked.get(path, ocp.PLACEHOLDER) for path in stored.paths]
            with _alone():
                loaded = ocp.load(
                    orbax_folder(step_uri),
                    jax.tree.unflatten(stored.structure, abstract),
                    checkpointable_name=item,
                )
        found = dict(zip(stored.paths, jax.tree.leaves(loaded), strict=True))
        values = {path: found[path] for path in read}
        _ensure_not_narrowed(values, asked, where, item)
    for path, form in stored.forms.items():
        if path not in wanted:
            continue
        if form.kind == "empty":
            values[path] = wanted[path].empty()
        else:
            values[path] = restore_form(values[path], form, wanted[path].sharding)
    return values


def _alone() -> Any:
    """An Orbax context in which reading waits for no other process: `processes.together` does."""
    context = ocp.Context()
    if jax.process_count() > 1:
        context.multiprocessing.primary_host = jax.process_index()
        context.multiprocessing.active_processes = {jax.process_index()}
    return context


def _ensure_not_narrowed(
    values: Mapping[str, Any], asked: Mapping[str, Any], where: object, item: str
) -> None:
    """JAX makes 64-bit values 32-bit on devices unless it is told not to."""
    problems = [
        f"{path}: expected dtype {dtype_name(asked[path].dtype)}, JAX made "
        f"{dtype_name(value.dtype)} of it; set jax_enable_x64 for the whole process"
        for path, value in values.items()
        if isinstance(value, jax.Array) and value.dtype != asked[path].dtype
    ]
    if problems:
        raise TreeMismatchError(
            f"item {item!r} does not fit the devices",
            path=where,
            expected="every dtype to be kept",
            found=f"{len(problems)} that are not",
            next_step="Turn x64 on, or restore these leaves as NumPy arrays.",
            problems=problems,
        )


def _stored(step_uri: StoreURI, item: str, where: object) -> _Stored:
    handlers, custom = _step_metadata(step_uri, where)
    known = set(handlers) | set(custom.get("items", ()))
    if item not in known or item == META_ITEM:
        raise NotFoundError(
            "no such item",
            path=where,
            expected=f"item {item!r} with a tree",
            found=f"items {', '.join(sorted(known))}",
            next_step="Load one of these.",
        )
    forms = {
        path: LeafForm(kind, tuple(shape), dtype)
        for path, (kind, shape, dtype) in custom.get("forms", {}).get(item, {}).items()
    }
    metadata: Any = {}
    if item in handlers:
        with _mapped(where, item, ()):
            metadata = ocp.metadata(orbax_folder(step_uri), item).metadata
        if metadata is None:
            raise _unreadable(step_uri, item, where)
    paths = trees.paths(metadata)
    leaves = {
        path: jax.ShapeDtypeStruct(np.shape(leaf), _dtype_of(leaf))
        for path, leaf in zip(paths, jax.tree.leaves(metadata), strict=True)
    }
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    for path, form in forms.items():
        leaves[path] = _logical(form)
    return _Stored(jax.tree.structure(metadata), paths, leaves, forms, shapes)


def _unreadable(step_uri: StoreURI, item: str, where: object) -> StorageError:
    """Why Orbax gave no metadata; it logs the reason and keeps it to itself."""
    try:
        CheckpointReader.open(step_uri).leaves(item)
    except StorageError as exc:
        return exc
    return CorruptionError(
        "unreadable tree metadata",
        path=f"{where}: {item}",
        expected="the metadata of a tree",
        found="none that Orbax can read",
        next_step="Load another step, or restore this one from a backup.",
    )


def _dtype_of(leaf: Any) -> Any:
    """Of Orbax's metadata of a leaf; Python numbers stand for themselves there."""
    return leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype


def _logical(form: LeafForm) -> jax.ShapeDtypeStruct:
    if form.kind == "key":
        key = jax.eval_shape(lambda: jax.random.key(0, impl=form.dtype))
        return jax.ShapeDtypeStruct(form.shape, key.dtype)
    return jax.ShapeDtypeStruct(form.shape, jnp.dtype(form.dtype))


def _step_metadata(step_uri: StoreURI, where: object) -> tuple[dict[str, Any], dict[str, Any]]:
    """(items that Orbax stored, our part of its custom metadata)."""
    found = ObjectStore.open(step_uri).read(STEP_METADATA)
    if found is None:
        raise _no_checkpoint(step_uri, where)
    body = parse_json_object(found.value, path=step_uri / STEP_METADATA)
    handlers, custom = body.get("item_handlers"), body.get("custom_metadata")
    if not isinstance(handlers, dict):
        raise NotACheckpointError(
            "not a checkpoint with items",
            path=where,
            expected="an Orbax checkpoint that names its items",
            found=f"item_handlers of type {type(handlers).__name__}",
            next_step="Save it again with save_checkpointables, or give the run's URI.",
        )
    ours = custom.get(CUSTOM_KEY) if isinstance(custom, dict) else None
    return handlers, ours if isinstance(ours, dict) else {}


def _no_checkpoint(step_uri: StoreURI, where: object) -> StorageError:
    some = ObjectStore.open(step_uri).list()[:3]
    if not some:
        return StepNotFoundError(
            "no such step",
            path=where,
            expected="the folder of a checkpoint",
            found="nothing",
            next_step="Check the path; `cairn checkpoints` lists a run's steps.",
        )
    return NotACheckpointError(
        "not a checkpoint",
        path=where,
        expected=f"a folder with {STEP_METADATA}, written by a finished save",
        found=f"{', '.join(some)}, …",
        next_step="Give the folder of a step, or the run's URI.",
    )


@contextmanager
def _mapped(where: object, item: str, paths: Sequence[str]) -> Iterator[None]:
    """Turns what Orbax raises while reading into an error that names the leaf."""
    try:
        yield
    except StorageError:
        raise
    except Exception as exc:
        known = translate(exc, path=where)
        if isinstance(known, StoreUnavailableError):
            raise known from exc
        text = next((text for text in _texts(exc) if "DATA_LOSS" in text), str(exc))
        leaf = _leaf_in(_texts(exc), paths)
        raise CorruptionError(
            "corrupt checkpoint",
            path=f"{where}: {item}/{leaf}" if leaf else f"{where}: {item}",
            expected="bytes that match their checksum",
            found=" ".join(text.split())[:400],
            next_step="Load another step, or restore this one from a backup.",
        ) from exc


def _texts(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def _leaf_in(texts: Iterator[str], paths: Sequence[str]) -> str | None:
    """The leaf whose chunk an error's text names."""
    by_name = {path.replace("/", "."): path for path in paths}
    for text in texts:
        for name in _LEAF_IN_TEXT.findall(text):
            return by_name.get(name) or str(name).replace(".", "/")
    return None
