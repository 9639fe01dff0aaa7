"""Saving and loading of a TrainState: its parameters, its optimizer state, its added fields."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from cairn.state.errors import ArgumentError, OptimizerError, OptimizerNotFoundError
from cairn.state.paths import named_leaves
from cairn.state.saving.checkpoint import StoredCheckpoint
from cairn.state.saving.state_saving import SaveArguments, store
from cairn.state.sharding import home_of, place_step
from cairn.storage.arrays import dtype_named
from cairn.storage.runs import LeafRecord
from cairn.storage.training import SaveHandle

__all__ = ["load_train_state", "save_train_state"]

_KINDS: Mapping[type, str] = {bool: "b", int: "iu", float: "f", complex: "c"}
_ONLY = "value"


def save_train_state(
    state: Any, save_directory: str | os.PathLike[str], arguments: SaveArguments
) -> SaveHandle:
    """Saves a state to a run.

    Args:
        state: a `TrainState`.
        save_directory: the run.
        arguments: those of `save_state`.

    Raises:
        ArgumentError: if an argument is not what it must be, or processes disagree about `enable`.
        StorageError: if the store refuses the save.
    """
    items = {"model": _as_item(state.params)}
    if arguments.save_optimizer and state.opt_state is not None:
        items["optimizer"] = _as_item(state.opt_state)
    if jax.tree.leaves(state.added_fields):
        items["fields"] = state.added_fields
    numbers = {
        item: {
            named.path: type(named.leaf).__name__
            for named in named_leaves(tree)
            if type(named.leaf) in _KINDS
        }
        for item, tree in items.items()
    }
    meta = {
        "model_class": None,
        "model_type": None,
        "config": None,
        "tx_init": None,
        "python_numbers": numbers,
    }
    return store(state.step, save_directory, items, meta, arguments)


def load_train_state(
    target: Any, reference: str | os.PathLike[str], *, step: SupportsIndex | None, optimizer: str
) -> Any:
    """Returns the stored state in the form of the target; `TrainState.load_state` says how.

    Raises:
        FileNotFoundError: if there is no such run, alias or step.
        ValueError: if the checkpoint does not fit; every leaf is listed.
    """
    if optimizer not in ("require", "skip"):
        raise ArgumentError(path="optimizer", expected="'require' or 'skip'", found=repr(optimizer))
    checkpoint = StoredCheckpoint.open(reference, step=step)
    targets = {"model": _as_item(target.params)}
    if optimizer == "require" and _needs_optimizer(checkpoint, target.opt_state):
        targets["optimizer"] = _as_item(target.opt_state)
    if jax.tree.leaves(target.added_fields) or "fields" in checkpoint.items:
        targets["fields"] = target.added_fields
    forms = {item: _forms(checkpoint, item, tree) for item, tree in targets.items()}
    checkpoint.check({item: _filled(tree, forms[item], 0) for item, tree in targets.items()})
    restored = {
        item: checkpoint.restore(item, _filled(tree, forms[item], 1))
        for item, tree in targets.items()
    }
    finished = {
        item: jax.tree.unflatten(
            jax.tree.structure(tree),
            [
                leaf if form.like is None else _weak(leaf, form.like)
                for leaf, form in zip(jax.tree.leaves(tree), forms[item], strict=True)
            ],
        )
        for item, tree in restored.items()
    }
    params = _from_item(finished["model"], target.params)
    opt_state = target.opt_state if optimizer == "require" else None
    if "optimizer" in finished:
        opt_state = _from_item(finished["optimizer"], target.opt_state)
    loaded = target.replace(
        step=place_step(checkpoint.meta["step"], home_of(params)),
        params=params,
        opt_state=opt_state,
        **finished.get("fields", {}),
    )
    object.__setattr__(loaded, "_extras", dict(checkpoint.meta.get("extras") or {}))
    return loaded


class _Form(NamedTuple):
    """How one leaf is loaded.

    Attributes:
        check: what must fit the stored leaf.
        ask: what to restore it into.
        like: the weakly typed array to make of the restored number; None to keep it as it is.
    """

    check: Any
    ask: Any
    like: Any = None


def _forms(checkpoint: StoredCheckpoint, item: str, tree: Any) -> list[_Form]:
    stored = checkpoint.leaves(item)
    numbers = checkpoint.meta.get("python_numbers", {}).get(item, {})
    return [
        _form(named.leaf, stored.get(named.path), named.path in numbers)
        for named in named_leaves(tree)
    ]


def _form(leaf: Any, record: LeafRecord | None, from_python: bool) -> _Form:
    number = leaf if type(leaf) in _KINDS else _number_of(leaf, from_python)
    if number is not None and record is not None and _takes(number, record):
        # The dtype is the stored one by choice: a number has no other.
        check = np.zeros((), dtype_named(record.dtype))
        stays_array = isinstance(leaf, jax.Array) or (hasattr(leaf, "dtype") and not from_python)
        return _Form(check, number, leaf if stays_array else None)
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
        abstract = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        return _Form(abstract, abstract)
    return _Form(np.asarray(leaf), leaf)


def _number_of(leaf: Any, from_python: bool) -> Any:
    """A Python number of a leaf's kind, if JAX made the leaf of one; else None.

    JAX types such a leaf weakly; of bools it keeps no trace, but the checkpoint does.
    """
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or leaf.shape != ():
        return None
    if leaf.dtype == jnp.bool_:
        return False if from_python and isinstance(leaf, jax.ShapeDtypeStruct) else None
    if not getattr(leaf, "weak_type", False):
        return None
    number = np.zeros((), leaf.dtype).item()
    return number if jnp.asarray(number).dtype == leaf.dtype else None


def _takes(number: Any, record: LeafRecord) -> bool:
    if record.shape or record.dtype.startswith("key<"):
        return False
    return dtype_named(record.dtype).kind in _KINDS[type(number)]


def _weak(number: Any, like: Any) -> Any:
    # The number itself: an array that one process has would not go to the devices of others.
    return jnp.asarray(number) if like.sharding is None else jax.device_put(number, like.sharding)


def _filled(tree: Any, forms: list[_Form], part: int) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), [form[part] for form in forms])


def _needs_optimizer(checkpoint: StoredCheckpoint, opt_state: Any) -> bool:
    """Says whether there is optimizer state to load.

    Raises:
        OptimizerNotFoundError: if only the target has one.
        OptimizerError: if only the checkpoint has one.
    """
    stored = "optimizer" in checkpoint.items
    if opt_state is not None and not stored:
        raise OptimizerNotFoundError(
            path=checkpoint.uri,
            expected="an item 'optimizer'",
            found=f"items {', '.join(checkpoint.items)}",
            next_step="pass optimizer='skip' to load without it",
        )
    if opt_state is None and stored:
        raise OptimizerError(
            path=checkpoint.uri,
            expected="a target with the optimizer that the stored optimizer state belongs to",
            found="opt_state=None",
            next_step="create the target with tx=, or pass optimizer='skip' to load without it",
        )
    return stored


def _as_item(tree: Any) -> Any:
    """A tree that can be stored: a leaf by itself has no path, so that it gets one."""
    return {_ONLY: tree} if _is_leaf(tree) else tree


def _from_item(item: Any, like: Any) -> Any:
    return item[_ONLY] if _is_leaf(like) else item


def _is_leaf(tree: Any) -> bool:
    leaf: Any = jax.tree.structure(0)
    return bool(jax.tree.structure(tree) == leaf)
