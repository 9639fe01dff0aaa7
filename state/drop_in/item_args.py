"""Orbax's arguments for items, as trees, JSON and iterators to save, and as targets to restore.

The target of a restore is determined leaf by leaf, from the caller's target and arguments and from
the stored leaf. As with Orbax, a leaf for which the caller gives no sharding gets the sharding with
which it was saved.
"""

import dataclasses
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, Literal, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from cairn.state.checkpointing.leaf_forms import is_key_dtype
from cairn.state.checkpointing.modules import open_modules
from cairn.state.checkpointing.trees import flatten
from cairn.state.drop_in.containers import Containers, is_empty
from cairn.state.drop_in.single_values import (
    RESTORE_ARGS,
    SAVE_ARGS,
    VALUE,
    SingleValue,
    as_json,
    kind_of,
    problem_of,
)
from cairn.storage.arrays.orbax_tree import array_name
from cairn.storage.errors import TreeMismatchError, UnsupportedFormatError

__all__ = [
    "SINGLE_ITEM",
    "Kind",
    "Kinds",
    "SaveItems",
    "TreeTarget",
    "in_layouts",
    "restore_items",
    "save_items",
    "tree_target",
]

SINGLE_ITEM: Final = "state"
"""Name of an item that is saved without a name."""

_TREE_SAVES: Final = (ocp.args.StandardSave, ocp.args.PyTreeSave)
_TREE_RESTORES: Final = (ocp.args.StandardRestore, ocp.args.PyTreeRestore)
_HELD: Final[Mapping["Kind", str]] = {
    "tree": "a tree",
    "json": "JSON",
    "iterator": "an iterator",
    "array": "an array",
    "jax key": "a random key of JAX",
    "numpy state": "a state of NumPy's generator",
}
_ONE_ITERATOR: Final = (
    "expected one of this process; Grain's ElasticIterator goes on with another number of them"
)
_TARGETS: Final = (
    *(jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic),
    *(bool, int, float, complex),
)
"""Types of a target's leaves that describe the leaf to restore."""


Kind = Literal["tree", "json", "iterator"] | SingleValue
"""Kind of an item; "iterator" is one of Grain's, with Grain's own arguments."""


_HANDLERS: Final[Mapping[type[Any], Kind]] = {
    ocp.PyTreeCheckpointHandler: "tree",
    ocp.StandardCheckpointHandler: "tree",
    ocp.JsonCheckpointHandler: "json",
    ocp.ArrayCheckpointHandler: "array",
    ocp.JaxRandomKeyCheckpointHandler: "jax key",
    ocp.NumpyRandomKeyCheckpointHandler: "numpy state",
}
_LEGACY_SAVES: Final[Mapping[Kind, type[Any]]] = {
    "tree": ocp.args.PyTreeSave,
    "json": ocp.args.JsonSave,
    **{kind: save for save, kind in SAVE_ARGS.items()},
}
_LEGACY_RESTORES: Final[Mapping[Kind, type[Any]]] = {
    "tree": ocp.args.PyTreeRestore,
    "json": ocp.args.JsonRestore,
    **dict(RESTORE_ARGS.items()),
}


class Kinds(NamedTuple):
    """Kinds of a manager's items, according to its handlers.

    Attributes:
        by_name: kind of each item, by name; None for a kind that is not known. None instead of a
            mapping if the manager has one item without a name.
        single: kind of the one item without a name; None if not known.
    """

    by_name: dict[str, Kind | None] | None
    single: Kind | None = None


class SaveItems(NamedTuple):
    """Items of a call of `save`.

    Attributes:
        trees: the items that are trees, by name.
        json: the items that are JSON, by name.
        iterators: the items that are iterators, by name.
        values: kind of those items of `trees` or `json` that are a single value, by name.
        custom_metadata: custom metadata of the items that have some, by name.
        single: True if there is one item, which was given without a name.
    """

    trees: dict[str, Any]
    json: dict[str, Any]
    iterators: dict[str, Any]
    values: dict[str, SingleValue]
    custom_metadata: dict[str, Any]
    single: bool


def save_items(args: Any, names: Collection[str] | None, is_single: bool | None) -> SaveItems:
    """Return the items of `save(args=...)`.

    Args:
        args: the caller's arguments.
        names: names of the manager's items; None if it has no names.
        is_single: whether the manager has one item without a name; None if not known yet.

    Raises:
        UnsupportedFormatError: arguments are of unsupported kinds, are for items that the manager
            does not have, or have values that can't be stored; all are listed.
    """
    single = not isinstance(args, ocp.args.Composite)
    named = {SINGLE_ITEM: args} if single else dict(args.items())
    trees: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    iterators: dict[str, Any] = {}
    values: dict[str, SingleValue] = {}
    custom_metadata: dict[str, Any] = {}
    problems = [] if named else ["a Composite of nothing"]
    if is_single is not None and single is not is_single:
        kind = "one item without a name" if is_single else "a Composite of items with names"
        problems.append(f"{_kind(args)}, where this manager has {kind}")
    elif names:
        known_names = ", ".join(map(repr, names))
        problems += [
            f"{name}: the manager has {known_names}" for name in named if name not in names
        ]
    for name, item_args in named.items():
        if isinstance(item_args, ocp.args.JsonSave):
            texts[name] = item_args.item
        elif _is_of_grain(item_args, saving=True):
            iterators[name], problem = _own_iterator(item_args.item)
            problems += [f"{name}: {problem}"] if problem else []
        elif isinstance(item_args, _TREE_SAVES):
            tree = item_args.item
            if tree is None or jax.tree_util.all_leaves([tree]):
                problems.append(f"{name}: {type(tree).__name__} alone; put it into a dict")
            trees[name] = _in_dtypes(tree, item_args.save_args)
            if item_args.custom_metadata is not None:
                custom_metadata[name] = item_args.custom_metadata
        elif (value := kind_of(item_args)) is not None:
            values[name] = value
            problem = problem_of(value, item_args.item)
            problems += [f"{name}: {problem}"] if problem else []
            if value == "numpy state":
                texts[name] = as_json(item_args.item)
            else:
                save_args = item_args.save_args and {VALUE: item_args.save_args}
                trees[name] = _in_dtypes({VALUE: item_args.item}, save_args)
        else:
            problems.append(f"{name}: {_kind(item_args)}")
    _refuse(
        problems,
        "StandardSave, PyTreeSave, JsonSave, ArraySave, JaxRandomKeySave, NumpyRandomKeySave or "
        "Grain's CheckpointSave for each item",
    )
    return SaveItems(trees, texts, iterators, values, custom_metadata, single)


def _grain_handlers() -> tuple[type[Any], ...]:
    """Return Grain's checkpoint handler, for `isinstance`; empty if Grain is not imported."""
    module = sys.modules.get("grain.checkpoint")
    return () if module is None else (module.CheckpointHandler,)


def _is_of_grain(item_args: Any, *, saving: bool) -> bool:
    """Return True for arguments of Grain's handler or of a subclass of it."""
    handlers = _grain_handlers()
    if not handlers or not isinstance(item_args, ocp.args.CheckpointArgs):
        return False
    try:
        handler = ocp.args.get_registered_handler_cls(item_args)
    except ValueError:
        return False
    if not issubclass(handler, handlers):
        return False
    save, restore = ocp.args.get_registered_args_cls(handler)
    return isinstance(item_args, save if saving else restore)


def _own_iterator(item: Any) -> tuple[Any, str]:
    """Return the iterator of this process to save, and what is wrong with it; "" if nothing.

    MaxText passes a list, with (iterator, process, number of processes) for each iterator.
    """
    if not isinstance(item, list):
        return item, ""
    here = (int(jax.process_index()), int(jax.process_count()))
    if len(item) == 1 and tuple(item[0][1:]) == here:
        return item[0][0], ""
    return None, f"{len(item)} iterators, {_ONE_ITERATOR}"


def _in_dtypes(tree: Any, save_args: Any) -> Any:
    """Return the tree with its leaves cast to the dtypes of their `SaveArgs`.

    Raises:
        UnsupportedFormatError: `save_args` has another structure than the tree.
    """
    if save_args is None:
        return tree
    structure: Any
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_empty)
    leaf_args: list[Any] = []
    mismatch: Any = None
    try:
        leaf_args = structure.flatten_up_to(save_args)
    except ValueError as exc:
        mismatch = exc
    pairs = [*zip(leaves, leaf_args, strict=False)]
    odd = (args for leaf, args in pairs if not (is_empty(leaf) and is_empty(args)))
    mismatch = mismatch or next(
        (args for args in odd if not isinstance(args, ocp.SaveArgs | None)), None
    )
    if mismatch is not None:
        raise UnsupportedFormatError(
            "save_args have another structure than the item",
            path="save_args",
            expected=f"{len(leaves)} SaveArgs, one for each leaf",
            found=f"{_kind(mismatch)}: {mismatch}"[:500],
            next_step="Make them with jax.tree.map over the item.",
        )
    cast = []
    for leaf, args in pairs:
        if is_empty(leaf) or not args or args.dtype is None:
            cast.append(leaf)
        else:
            array = leaf if hasattr(leaf, "astype") else np.asarray(leaf)
            cast.append(array.astype(args.dtype))
    return jax.tree.unflatten(structure, cast)


def restore_items(args: Any, stored: Mapping[str, Kind], *, single: str | None) -> dict[str, Any]:
    """Return the arguments of `restore(args=...)` by item; None: restore the item as it was saved.

    Args:
        args: the caller's arguments. None, or a Composite without items, means all items except
            iterators, which can't be restored without an object to set.
        stored: kind of each stored item, by name.
        single: name of the item that arguments without a name are for; None if there is none.

    Raises:
        UnsupportedFormatError: arguments are of unsupported kinds, or do not fit the kind of their
            item, or the step has no such item; all are listed.
    """
    if args is None or (isinstance(args, ocp.args.Composite) and not args):
        return dict.fromkeys(name for name, kind in stored.items() if kind != "iterator")
    if isinstance(args, ocp.args.Composite):
        named = dict(args.items())
    elif single is None:
        raise UnsupportedFormatError(
            "the item has no name",
            path="args",
            expected="a Composite, of items " + ", ".join(map(repr, stored)),
            found=_kind(args),
            next_step="Name the item: ocp.args.Composite(name=...).",
        )
    else:
        named = {single: args}
    taken: dict[Kind, tuple[type[Any], ...]] = {
        "tree": _TREE_RESTORES,
        "json": (ocp.args.JsonRestore,),
        **{kind: (restore,) for kind, restore in RESTORE_ARGS.items()},
    }
    problems = []
    for name, item_args in named.items():
        if name not in stored:
            problems.append(f"{name}: no such item; there are {', '.join(map(repr, stored))}")
        elif item_args is None and stored[name] == "iterator":
            problems.append(f"{name}: None for an iterator; give CheckpointRestore of one to set")
        elif item_args is not None and not (
            _is_of_grain(item_args, saving=False)
            if stored[name] == "iterator"
            else isinstance(item_args, taken[stored[name]])
        ):
            problems.append(f"{name}: {_kind(item_args)} for {_HELD[stored[name]]}")
        else:
            problems += [f"{name}: {problem}" for problem in _not_read(item_args)]
    _refuse(
        problems,
        "StandardRestore or PyTreeRestore for each tree, JsonRestore for JSON, ArrayRestore, "
        "JaxRandomKeyRestore or NumpyRandomKeyRestore for what was saved so, Grain's "
        "CheckpointRestore for iterators",
    )
    return named


def _not_read(item_args: Any) -> list[str]:
    problems = []
    here = {"process_index": int(jax.process_index()), "process_count": int(jax.process_count())}
    if any(getattr(item_args, name, None) not in (None, own) for name, own in here.items()):
        problems.append(f"process_index and process_count of other processes, {_ONE_ITERATOR}")
    if not isinstance(item_args, ocp.args.PyTreeRestore):
        return problems
    if item_args.transforms is not None or item_args.legacy_transform_fn is not None:
        problems.append("transforms; restore with cairn.load(..., only=...), and change it then")
    return problems


def legacy_args(items: Any, kwargs: Any, kinds: Kinds, *, saving: bool) -> Any:
    """Return the `args` that are equivalent to Orbax's older arguments of `save` or `restore`.

    Args:
        items: one item, or items by name.
        kwargs: further arguments of the one item, or of items by name.
        kinds: kinds of the manager's items.
        saving: True for a save, False for a restore.

    Raises:
        UnsupportedFormatError: `items` is an object for `args`.
    """
    if isinstance(items, ocp.args.CheckpointArgs):
        _refuse([f"{_kind(items)} as items"], f"args={_kind(items)}(...), by its name")
    classes = _LEGACY_SAVES if saving else _LEGACY_RESTORES
    if kinds.by_name is None:
        return _legacy(classes[kinds.single or "tree"], items, kwargs)
    items, kwargs = items or {}, kwargs or {}
    return ocp.args.Composite(
        **{
            name: _legacy(
                classes[kinds.by_name.get(name) or "tree"], items.get(name), kwargs.get(name)
            )
            for name in {**items, **kwargs}
        }
    )


def _legacy(make: type[Any], item: Any, kwargs: Any) -> Any:
    """Return the arguments of an item, of the class `make`; the item only if the class has one."""
    names = {field.name for field in dataclasses.fields(make)}
    return make(**({"item": item} if "item" in names else {}), **(kwargs or {}))


def kinds_of(handlers: Mapping[str, Any]) -> dict[str, Kind | None]:
    """Return the kind of each item according to its handler; None if a handler is None or Grain's.

    Raises:
        UnsupportedFormatError: handlers are for unsupported kinds of items; all are listed.
    """
    kinds: dict[str, Kind | None] = {}
    problems = []
    for name, entry in handlers.items():
        handler = getattr(entry, "handler", entry)  # a checkpointer has one
        if handler is None or isinstance(handler, _grain_handlers()):
            kinds[name] = None
            continue
        kind = next((kind for cls, kind in _HANDLERS.items() if isinstance(handler, cls)), None)
        kinds[name] = kind
        if kind is None:
            problems.append(f"{name}: {_kind(handler)}")
    _refuse(problems, "handlers of PyTree, Standard, Json, Array or random key items, or Grain's")
    return kinds


def _refuse(problems: list[str], expected: str) -> None:
    if problems:
        raise UnsupportedFormatError(
            "items that a Cairn run can't hold or give this way",
            path="args",
            expected=expected,
            found="; ".join(problems),
            next_step="Change these items, or keep them beside the run.",
        )


def _kind(value: Any) -> str:
    return type(value).__name__


class TreeTarget(NamedTuple):
    """Target of a tree to restore.

    Attributes:
        tree: the tree as a target for `cairn.load`.
        gaps: paths that are not read: of placeholders, of empty nodes, and of stored leaves that a
            partial restore leaves out.
    """

    tree: Any
    gaps: set[str]


def tree_target(
    item_args: Any,
    stored: Mapping[str, jax.ShapeDtypeStruct],
    texts: Collection[str],
    *,
    name: str,
    array_names: Mapping[str, str],
    variables: Mapping[str, str],
    containers: Callable[[], Containers],
    metadata: Callable[[], Any],
) -> TreeTarget:
    """Return the target of a tree to restore.

    Args:
        item_args: Orbax's arguments of the item; None to restore it as saved, in lists and dicts.
        stored: shape and dtype of each stored leaf, by path.
        texts: paths of stored leaves that are text.
        name: the item's name.
        array_names: Orbax's name of a leaf's array, by path, where it is not the path itself.
        variables: path at which Orbax has the value of a Variable, by the Variable's path.
        containers: function that returns the containers in which the leaves were saved.
        metadata: function that returns Orbax's metadata of the item.

    Raises:
        UnsupportedFormatError: the stored tree is a single leaf, without a key.
        TreeMismatchError: the target's shape or dtype of a leaf differs from the stored one, its
            devices do not exist, or the target's leaf is of an unsupported type; all are listed.
    """
    if {*stored, *texts} == {""}:
        raise UnsupportedFormatError(
            "a tree that is one leaf",
            path=name,
            expected="a tree whose leaves have keys",
            found="a leaf without a key",
            next_step='Read it with CheckpointReader.read(item, "").',
        )
    item = None if item_args is None else item_args.item
    # As stored, whatever the item's leaves say.
    fixed = isinstance(item_args, ocp.args.PyTreeRestore)
    restore_args = item_args.restore_args if fixed else None
    if item is None:
        item = restore_args
    if item is None:
        saved, as_saved = containers(), {variables.get(path, path): stored[path] for path in stored}
        item = saved.nest({**as_saved, **saved.numbers_in(as_saved), **dict.fromkeys(texts, "")})
    opened = open_modules({name: item})
    tree = opened.trees[name]
    leaves = flatten(tree)
    # As a load does: at the paths of the target, with or without the Variables' "value".
    moved = {path: saved_at for path, saved_at in variables.items() if saved_at in leaves}
    stored = {moved.get(path, path): leaf for path, leaf in stored.items()}
    has_item = item_args is not None and item_args.item is not None
    gaps = _empty_places(tree) if has_item else set()
    gaps |= {path for path, saved_at in variables.items() if saved_at in gaps}
    is_partial = fixed and has_item and item_args.partial_restore
    if is_partial:
        gaps |= {*stored, *texts} - leaves.keys()
    if restore_args is not None:
        restore_args = open_modules({name: restore_args}).trees[name]
    args = {} if restore_args is None else flatten(restore_args)
    fallback = (
        item_args.fallback_sharding if isinstance(item_args, ocp.args.StandardRestore) else None
    )
    placed = _Placements(metadata, array_names, fallback)
    problems: list[str] = []
    if restore_args is not None:
        left = leaves.keys() - args - _empty_places(restore_args)
        problems += [f"{path}: no restore_args for it" for path in sorted(left)]
        problems += [
            f"{path}: restore_args for no leaf"
            for path in sorted(args.keys() - leaves - gaps)
            if not is_partial
        ]
    target_leaves = [
        ("" if fixed or isinstance(leaf, ocp.metadata.value.Metadata) else leaf)
        if path in texts and leaf is not ...
        else _target_of(leaf, stored.get(path), args.get(path), path, placed, fixed, problems)
        for path, leaf in leaves.items()
    ]
    if problems:
        raise TreeMismatchError(
            "the step can't be restored as asked",
            path=name,
            expected="shapes and dtypes as they are stored, on devices that are there",
            found=f"{len(problems)} leaves that are not",
            next_step="Give these leaves a sharding, and the shape and dtype that they have.",
            problems=problems,
        )
    filled = jax.tree.unflatten(jax.tree.structure(tree), target_leaves)
    return TreeTarget(opened.close({**opened.trees, name: filled})[name], gaps)


def in_layouts(tree: Any, item_args: Any) -> Any:
    """Return the restored tree; with `support_layout`, in the device layouts of the target."""
    is_standard = isinstance(item_args, ocp.args.StandardRestore)
    if not is_standard or not item_args.support_layout or item_args.item is None:
        return tree

    def put(leaf: Any, target: Any) -> Any:
        layout = getattr(target, "format", None)
        if not isinstance(leaf, jax.Array) or getattr(layout, "layout", None) is None:
            return leaf
        return jax.device_put(leaf, layout)

    return jax.tree.map(put, tree, item_args.item)


def _empty_places(tree: Any) -> set[str]:
    """Return the paths at which a tree has None, an empty container or a placeholder.

    As with Orbax, leaves that are stored at these paths are not read.
    """
    if is_empty(tree):
        return set()
    marked = jax.tree.map(lambda node: ... if is_empty(node) else node, tree, is_leaf=is_empty)
    return {path for path, leaf in flatten(marked).items() if leaf is ...}


def _target_of(
    leaf: Any,
    stored: jax.ShapeDtypeStruct | None,
    args: Any,
    path: str,
    placed: "_Placements",
    fixed: bool,
    problems: list[str],
) -> Any:
    """Return the target's leaf for `cairn.load`, from the caller's leaf and its `RestoreArgs`.

    If that is not possible, add a line to `problems` and return the caller's leaf.
    """
    if leaf is ... and fixed:
        return leaf
    if args is None and fixed and isinstance(leaf, ocp.RestoreArgs):
        args = leaf
    as_words = stored is not None and _are_words(leaf, stored)
    described = isinstance(leaf, ocp.metadata.value.Metadata) or as_words
    placeless = described or (isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding is None)
    if stored is None or not (fixed or placeless):
        if not isinstance(leaf, _TARGETS):
            text = "not stored" if stored is None else f"{_kind(leaf)} is no target of a leaf"
            problems.append(f"{path}: {text}")
        return leaf
    has_shape = hasattr(leaf, "shape") and not isinstance(leaf, ocp.RestoreArgs)
    own = leaf if has_shape and not as_words else None
    shape = tuple(stored.shape)
    if own is not None and tuple(own.shape) != shape:
        problems.append(f"{path}: expected shape {tuple(own.shape)}, stored {shape}")
        return leaf
    if args is not None and _are_words(args, stored):
        args = dataclasses.replace(args, dtype=None, global_shape=None, shape=None)
    global_shape = getattr(args, "global_shape", None)
    if global_shape is not None and tuple(global_shape) != shape:
        how = "expected" if args.strict else "to be cut or padded to"
        problems.append(f"{path}: {how} shape {tuple(global_shape)}, stored {shape}")
        return leaf
    dtype = getattr(args, "dtype", None)
    if dtype is None and own is not None and own.dtype != stored.dtype:
        if fixed:
            problems.append(f"{path}: expected dtype {own.dtype}, stored {stored.dtype}")
            return leaf
        dtype = own.dtype
    dtype = stored.dtype if dtype is None else dtype
    kind = getattr(args, "restore_type", None)
    if kind in (int, float):
        return kind(0)
    if kind is np.ndarray and is_key_dtype(dtype):
        problems.append(f"{path}: np.ndarray for keys; jax.random.key_data has their words")
        return leaf
    sharding = getattr(args, "sharding", None)
    if sharding is None and as_words and not fixed and isinstance(leaf, jax.ShapeDtypeStruct):
        sharding = leaf.sharding
    if sharding is None and getattr(args, "mesh", None) is not None:
        sharding = jax.sharding.NamedSharding(args.mesh, args.mesh_axes)
    if isinstance(sharding, ocp.metadata.ShardingMetadata):
        sharding = sharding.to_jax_sharding()
    on_host = kind is np.ndarray
    if sharding is None and not on_host:
        sharding, was_on_host, problem = placed.of(path)
        on_host = was_on_host and kind is None
        if problem and isinstance(own, jax.Array | jax.ShapeDtypeStruct):
            sharding, problem = own.sharding, "" if own.sharding is not None else problem
        if problem:
            problems.append(f"{path}: {problem}")
            return leaf
    if on_host and kind is None and not shape and isinstance(leaf, int | float | complex):
        return leaf  # a Python number is restored as a Python number
    if on_host and not is_key_dtype(dtype):
        return np.broadcast_to(np.zeros((), dtype), shape)  # a shape and a dtype; no memory
    if isinstance(sharding, jax.sharding.NamedSharding) and is_key_dtype(dtype):
        # Orbax stores the sharding of the keys' words, which have an axis more than the keys.
        sharding = jax.sharding.NamedSharding(
            sharding.mesh,
            jax.sharding.PartitionSpec(*sharding.spec[: len(shape)]),
            memory_kind=sharding.memory_kind,
        )
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _are_words(leaf: Any, stored: jax.ShapeDtypeStruct) -> bool:
    """Return True if a leaf describes the words of stored PRNG keys, as Orbax's metadata does."""
    shape = getattr(leaf, "shape", None)
    if shape is None or not is_key_dtype(stored.dtype):
        return False
    words = jax.eval_shape(jax.random.key_data, stored)
    return bool(tuple(shape) == words.shape and leaf.dtype == words.dtype)


class _Placements:
    """Shardings with which an item's leaves were saved; read on first use."""

    def __init__(
        self,
        metadata: Callable[[], Any],
        array_names: Mapping[str, str],
        fallback: jax.sharding.Sharding | None,
    ) -> None:
        self._metadata = metadata
        self._array_names = array_names
        self._fallback = fallback
        self._leaves: dict[str, Any] | None = None

    def of(self, path: str) -> tuple[jax.sharding.Sharding | None, bool, str]:
        """Return a leaf's sharding, whether it was on the host, and what is wrong ("": nothing).

        The sharding is None for a leaf on the host and for one on a single device, which is
        restored to this process's first device.
        """
        if self._leaves is None:
            tree = flatten(self._metadata().tree)
            self._leaves = {array_name(saved_at): leaf for saved_at, leaf in tree.items()}
        name = self._array_names.get(path) or array_name(path)
        metadata = getattr(self._leaves.get(name), "sharding", None)
        if metadata is None:
            return None, True, ""
        if isinstance(metadata, ocp.metadata.SingleDeviceShardingMetadata):
            return None, False, ""
        try:
            return metadata.to_jax_sharding(), False, ""
        except ValueError as exc:
            if self._fallback is not None:
                return self._fallback, False, ""
            return None, False, f"no sharding is given, and where it was saved is not here: {exc}"
