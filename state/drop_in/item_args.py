"""Orbax's arguments for items, as trees, JSON and iterators to save, and as targets to restore.

A tree's target is worked out leaf by leaf from what Orbax was asked for and from what is stored:
where neither the target nor its arguments say where a leaf goes, it goes where it was when it was
saved, as with Orbax.
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
from cairn.state.checkpointing.trees import flatten, nest
from cairn.storage.errors import TreeMismatchError, UnsupportedFormatError

__all__ = [
    "SINGLE_ITEM",
    "Kind",
    "SaveItems",
    "TreeTarget",
    "restore_items",
    "save_items",
    "tree_target",
]

SINGLE_ITEM: Final = "state"
"""The name of an item that is saved without one."""

_TREE_SAVES: Final = (ocp.args.StandardSave, ocp.args.PyTreeSave)
_TREE_RESTORES: Final = (ocp.args.StandardRestore, ocp.args.PyTreeRestore)
_JSON_HANDLERS: Final = (ocp.JsonCheckpointHandler,)
_HELD: Final[Mapping["Kind", str]] = {"tree": "a tree", "json": "JSON", "iterator": "an iterator"}
_ONE_ITERATOR: Final = (
    "expected one of this process; Grain's ElasticIterator goes on with another number of them"
)
_TARGETS: Final = (
    *(jax.Array, jax.ShapeDtypeStruct, np.ndarray, np.generic),
    *(bool, int, float, complex),
)
"""Leaves of targets that say what to make."""

_TREE_HANDLERS: Final = (ocp.PyTreeCheckpointHandler, ocp.StandardCheckpointHandler)


Kind = Literal["tree", "json", "iterator"]
"""Of an item; an iterator is one of Grain's, whose arguments are Grain's own."""


class SaveItems(NamedTuple):
    """The items of a call of `save`.

    Attributes:
        trees: by name.
        json: by name.
        iterators: by name.
        single: it is one item, that was given without a name.
    """

    trees: dict[str, Any]
    json: dict[str, Any]
    iterators: dict[str, Any]
    single: bool


def save_items(args: Any, names: Collection[str] | None, is_single: bool | None) -> SaveItems:
    """What `save(args=...)` was given.

    Args:
        args: as given.
        names: of the manager's items; None if it was told none.
        is_single: whether the manager has one item without a name; None if that is open.

    Raises:
        UnsupportedFormatError: arguments of other kinds, for items that the manager does not have,
            or that ask for what is not stored; all are listed.
    """
    single = not isinstance(args, ocp.args.Composite)
    named = {SINGLE_ITEM: args} if single else dict(args.items())
    trees: dict[str, Any] = {}
    texts: dict[str, Any] = {}
    iterators: dict[str, Any] = {}
    problems = [] if named else ["a Composite of nothing"]
    if is_single is not None and single is not is_single:
        kind = "one item without a name" if is_single else "a Composite of items with names"
        problems.append(f"{_kind(args)}, where this manager has {kind}")
    elif names:
        known = ", ".join(map(repr, names))
        problems += [f"{name}: the manager has {known}" for name in named if name not in names]
    for name, one in named.items():
        if isinstance(one, ocp.args.JsonSave):
            texts[name] = one.item
        elif _is_of_grain(one, saving=True):
            iterators[name], problem = _own_iterator(one.item)
            problems += [f"{name}: {problem}"] if problem else []
        elif isinstance(one, _TREE_SAVES):
            problems += [f"{name}: {problem}" for problem in _not_stored(one)]
            trees[name] = _in_dtypes(one.item, one.save_args)
        else:
            problems.append(f"{name}: {_kind(one)}")
    _refuse(problems, "StandardSave, PyTreeSave, JsonSave or Grain's CheckpointSave for each item")
    return SaveItems(trees, texts, iterators, single)


def _of_grain(name: str) -> tuple[type[Any], ...]:
    """A class of Grain's, for `isinstance`; none where nobody has imported Grain."""
    module = sys.modules.get("grain.checkpoint")
    return () if module is None else (getattr(module, name),)


def _is_of_grain(one: Any, *, saving: bool) -> bool:
    """Whether these are arguments of Grain's handler, or of one that is made of it."""
    handlers = _of_grain("CheckpointHandler")
    if not handlers or not isinstance(one, ocp.args.CheckpointArgs):
        return False
    try:
        handler = ocp.args.get_registered_handler_cls(one)
    except ValueError:
        return False
    if not issubclass(handler, handlers):
        return False
    save, restore = ocp.args.get_registered_args_cls(handler)
    return isinstance(one, save if saving else restore)


def _own_iterator(item: Any) -> tuple[Any, str]:
    """(the iterator of this process, what is wrong) of what is to be saved.

    MaxText gives (iterator, process, processes) for each that a process has.
    """
    if not isinstance(item, list):
        return item, ""
    here = (int(jax.process_index()), int(jax.process_count()))
    if len(item) == 1 and tuple(item[0][1:]) == here:
        return item[0][0], ""
    return None, f"{len(item)} iterators, {_ONE_ITERATOR}"


def _not_stored(one: Any) -> list[str]:
    problems = []
    if one.custom_metadata is not None:
        problems.append("custom_metadata of one item; give it to save() for the step")
    if one.item is None or jax.tree_util.all_leaves([one.item]):
        problems.append(f"{type(one.item).__name__} alone; put it into a dict")
    return problems


def _in_dtypes(tree: Any, save_args: Any) -> Any:
    """The tree, its leaves cast as their `SaveArgs` say; at what is empty these say nothing."""
    if save_args is None:
        return tree
    structure: Any
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_empty)
    wanted: list[Any] = []
    found: Any = None
    try:
        wanted = structure.flatten_up_to(save_args)
    except ValueError as exc:
        found = exc
    pairs = [*zip(leaves, wanted, strict=False)]
    odd = (args for leaf, args in pairs if not (_is_empty(leaf) and _is_empty(args)))
    found = found or next((args for args in odd if not isinstance(args, ocp.SaveArgs | None)), None)
    if found is not None:
        raise UnsupportedFormatError(
            "save_args have another structure than the item",
            path="save_args",
            expected=f"{len(leaves)} SaveArgs, one for each leaf",
            found=f"{_kind(found)}: {found}"[:500],
            next_step="Make them with jax.tree.map over the item.",
        )
    cast = [
        leaf if _is_empty(leaf) or not args or args.dtype is None else _cast(leaf, args.dtype)
        for leaf, args in pairs
    ]
    return jax.tree.unflatten(structure, cast)


def _is_empty(node: Any) -> bool:
    """Whether a node of a tree is None or a container of nothing; Orbax stores no leaf for it."""
    return node is None or (isinstance(node, Mapping | list | tuple) and not node)


def _cast(leaf: Any, dtype: Any) -> Any:
    return leaf.astype(dtype) if hasattr(leaf, "astype") else np.asarray(leaf).astype(dtype)


def restore_items(args: Any, stored: Mapping[str, Kind], *, single: str | None) -> dict[str, Any]:
    """The arguments of `restore(args=...)` by item; None for an item as it was saved.

    Args:
        args: as given; None, or a Composite without items, for all items but iterators,
            of which there is nothing to make.
        stored: the items that there are, and what each is.
        single: the item that a call without a name means; None if there is no such item.

    Raises:
        UnsupportedFormatError: arguments of other kinds, for another kind of item, or for items
            that there are none of; all are listed.
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
    }
    problems = []
    for name, one in named.items():
        if name not in stored:
            problems.append(f"{name}: no such item; there are {', '.join(map(repr, stored))}")
        elif one is None and stored[name] == "iterator":
            problems.append(f"{name}: None for an iterator; give CheckpointRestore of one to set")
        elif one is not None and not (
            _is_of_grain(one, saving=False)
            if stored[name] == "iterator"
            else isinstance(one, taken[stored[name]])
        ):
            problems.append(f"{name}: {_kind(one)} for {_HELD[stored[name]]}")
        else:
            problems += [f"{name}: {problem}" for problem in _not_read(one)]
    _refuse(
        problems,
        "StandardRestore or PyTreeRestore for each tree, JsonRestore for JSON, Grain's "
        "CheckpointRestore for iterators",
    )
    return named


def _not_read(one: Any) -> list[str]:
    problems = []
    here = {"process_index": int(jax.process_index()), "process_count": int(jax.process_count())}
    if any(getattr(one, name, None) not in (None, own) for name, own in here.items()):
        problems.append(f"process_index and process_count of other processes, {_ONE_ITERATOR}")
    if isinstance(one, ocp.args.StandardRestore) and one.support_layout:
        problems.append("support_layout; arrays have the layout that JAX gives them")
    if not isinstance(one, ocp.args.PyTreeRestore):
        return problems
    if one.transforms is not None or one.legacy_transform_fn is not None:
        problems.append("transforms; restore with cairn.load(..., only=...), and change it then")
    return problems


def legacy_args(items: Any, kwargs: Any, names: Mapping[str, Any] | None, *, saving: bool) -> Any:
    """What calls without `args` mean: `save(step, items, save_kwargs)`, and `restore` alike.

    Args:
        items: one tree, or trees by name.
        kwargs: more for one tree, or by name.
        names: what the manager was made with: a handler for each item; None for one item.
        saving: whether it is a save.

    Raises:
        UnsupportedFormatError: `args` given in the place of `items`.
    """
    if isinstance(items, ocp.args.CheckpointArgs):
        _refuse([f"{_kind(items)} as items"], f"args={_kind(items)}(...), by its name")
    tree: Callable[..., Any] = ocp.args.PyTreeSave if saving else ocp.args.PyTreeRestore
    text: Callable[..., Any] = ocp.args.JsonSave if saving else ocp.args.JsonRestore
    if names is None:
        return tree(items, **(kwargs or {}))
    items, kwargs = items or {}, kwargs or {}
    return ocp.args.Composite(
        **{
            name: (text if names.get(name) is False else tree)(
                items.get(name), **(kwargs.get(name) or {})
            )
            for name in {**items, **kwargs}
        }
    )


def kinds_of(handlers: Mapping[str, Any]) -> dict[str, bool | None]:
    """Whether each item is a tree, by what reads and writes it with Orbax; None if that is open.

    Raises:
        UnsupportedFormatError: handlers of other kinds of items; all are listed.
    """
    kinds: dict[str, bool | None] = {}
    problems = []
    for name, given in handlers.items():
        handler = getattr(given, "handler", given)  # a checkpointer has one
        if handler is None or isinstance(handler, _of_grain("CheckpointHandler")):
            kinds[name] = None
        elif isinstance(handler, _TREE_HANDLERS):
            kinds[name] = True
        elif isinstance(handler, _JSON_HANDLERS):
            kinds[name] = False
        else:
            problems.append(f"{name}: {_kind(handler)}")
    _refuse(problems, "handlers of PyTree, Standard or Json items, or Grain's")
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


def _kind(one: Any) -> str:
    return type(one).__name__


class TreeTarget(NamedTuple):
    """What a tree is restored into.

    Attributes:
        tree: a target of `cairn.load`.
        gaps: paths of stored leaves for which it has no place, and of placeholders.
    """

    tree: Any
    gaps: set[str]


def tree_target(
    one: Any,
    stored: Mapping[str, jax.ShapeDtypeStruct],
    texts: Collection[str],
    *,
    name: str,
    metadata: Callable[[], Any],
) -> TreeTarget:
    """What to restore a tree into.

    Args:
        one: Orbax's arguments for it; None to have it as it was saved, in plain dicts.
        stored: logical shape and dtype of each leaf by path.
        texts: paths of leaves that are text.
        name: the item's.
        metadata: gives Orbax's metadata of the item.

    Raises:
        TreeMismatchError: a leaf is asked for in another shape or dtype than it has, or is to go to
            devices that are not there, or can't be restored into; all are listed.
    """
    item = None if one is None else one.item
    fixed = isinstance(one, ocp.args.PyTreeRestore)  # as stored, whatever the item's leaves say
    restore_args = one.restore_args if fixed else None
    if item is None:
        item = restore_args
    if item is None:
        item = nest({**stored, **dict.fromkeys(texts, "")})
    opened = open_modules({name: item})
    tree = opened.trees[name]
    leaves = flatten(tree)
    has_item = one is not None and one.item is not None
    gaps = _empty_places(tree) if has_item else set()
    is_partial = fixed and has_item and one.partial_restore
    if is_partial:
        gaps |= {*stored, *texts} - leaves.keys()
    if restore_args is not None:
        restore_args = open_modules({name: restore_args}).trees[name]
    args = {} if restore_args is None else flatten(restore_args)
    fallback = one.fallback_sharding if isinstance(one, ocp.args.StandardRestore) else None
    placed = _Placements(metadata, fallback)
    problems: list[str] = []
    if restore_args is not None:
        left = leaves.keys() - args - _empty_places(restore_args)
        problems += [f"{path}: no restore_args for it" for path in sorted(left)]
        problems += [
            f"{path}: restore_args for no leaf"
            for path in sorted(args.keys() - leaves - gaps)
            if not is_partial
        ]
    wanted = [
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
    filled = jax.tree.unflatten(jax.tree.structure(tree), wanted)
    return TreeTarget(opened.close({**opened.trees, name: filled})[name], gaps)


def _empty_places(tree: Any) -> set[str]:
    """Paths at which a tree has None, an empty container or a placeholder.

    As with Orbax, a leaf that is stored there is not read, and the place stays as it is.
    """
    if _is_empty(tree):
        return set()
    marked = jax.tree.map(lambda node: ... if _is_empty(node) else node, tree, is_leaf=_is_empty)
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
    """The leaf to restore into, of one leaf as given and its arguments."""
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
    given = leaf if has_shape and not as_words else None
    shape = tuple(stored.shape)
    if given is not None and tuple(given.shape) != shape:
        problems.append(f"{path}: expected shape {tuple(given.shape)}, stored {shape}")
        return leaf
    if args is not None and _are_words(args, stored):
        args = dataclasses.replace(args, dtype=None, global_shape=None, shape=None)
    asked = getattr(args, "global_shape", None)
    if asked is not None and tuple(asked) != shape:
        how = "expected" if args.strict else "to be cut or padded to"
        problems.append(f"{path}: {how} shape {tuple(asked)}, stored {shape}")
        return leaf
    dtype = getattr(args, "dtype", None)
    if dtype is None and given is not None and given.dtype != stored.dtype:
        if fixed:
            problems.append(f"{path}: expected dtype {given.dtype}, stored {stored.dtype}")
            return leaf
        dtype = given.dtype
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
        if problem and isinstance(given, jax.Array | jax.ShapeDtypeStruct):
            sharding, problem = given.sharding, "" if given.sharding is not None else problem
        if problem:
            problems.append(f"{path}: {problem}")
            return leaf
    if on_host and kind is None and isinstance(leaf, int | float | complex):
        return leaf  # a number has no dtype: it comes back as the number that it was
    if on_host:
        return np.broadcast_to(np.zeros((), dtype), shape)  # a shape and a dtype; no memory
    if isinstance(sharding, jax.sharding.NamedSharding) and is_key_dtype(dtype):
        # Orbax stores the sharding of their words, whose last axis is none of the keys'.
        sharding = jax.sharding.NamedSharding(
            sharding.mesh,
            jax.sharding.PartitionSpec(*sharding.spec[: len(shape)]),
            memory_kind=sharding.memory_kind,
        )
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _are_words(one: Any, stored: jax.ShapeDtypeStruct) -> bool:
    """Whether this describes, as Orbax does, the words of what is stored as typed PRNG keys."""
    shape = getattr(one, "shape", None)
    if shape is None or not is_key_dtype(stored.dtype):
        return False
    words = jax.eval_shape(jax.random.key_data, stored)
    return bool(tuple(shape) == words.shape and one.dtype == words.dtype)


class _Placements:
    """Where the leaves of an item were when they were saved; read when first asked for."""

    def __init__(self, metadata: Callable[[], Any], fallback: jax.sharding.Sharding | None) -> None:
        self._metadata = metadata
        self._fallback = fallback
        self._leaves: dict[str, Any] | None = None

    def of(self, path: str) -> tuple[jax.sharding.Sharding | None, bool, str]:
        """(sharding, whether it was on the host, what is wrong) of a leaf.

        What lay on one device goes to the first of this process: no sharding.
        """
        if self._leaves is None:
            self._leaves = flatten(self._metadata().tree)
        found = getattr(self._leaves.get(path), "sharding", None)
        if found is None:
            return None, True, ""
        if isinstance(found, ocp.metadata.SingleDeviceShardingMetadata):
            return None, False, ""
        try:
            return found.to_jax_sharding(), False, ""
        except ValueError as exc:
            if self._fallback is not None:
                return self._fallback, False, ""
            return None, False, f"no sharding is given, and where it was saved is not here: {exc}"
