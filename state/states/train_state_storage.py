"""Saves and loads of a TrainState: parameters, optimizer state and added fields."""

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, SupportsIndex

import jax

from cairn.interop.errors import ArgumentError
from cairn.state.checkpointing.save_handle import SaveHandle, call_of_save
from cairn.state.errors import OptimizerError, OptimizerNotFoundError
from cairn.state.sharding.mesh import home_of
from cairn.state.sharding.states import place_step
from cairn.state.states.checkpoint import StoredCheckpoint
from cairn.state.states.number_forms import NumberForms, python_numbers, weak_leaves
from cairn.state.states.state_save import StateSaveOptions, store
from cairn.storage.runs.damage import OnDamage

__all__ = ["load_train_state", "save_train_state"]

_ONLY = "value"


@call_of_save()
def save_train_state(
    state: Any, save_directory: str | os.PathLike[str], options: StateSaveOptions
) -> SaveHandle:
    """Save a state to a run.

    Args:
        state: a `TrainState`.
        save_directory: the run.
        options: options of `save_state`.

    Raises:
        ArgumentError: if an argument is invalid, or differs between processes.
        StorageError: if the save fails.
    """
    items = {"model": _as_item(state.params)}
    if options.save_optimizer and state.opt_state is not None:
        items["optimizer"] = _as_item(state.opt_state)
    if jax.tree.leaves(state.added_fields):
        items["fields"] = state.added_fields
    leaves = jax.tree.leaves(items)
    meta = {
        "model_class": None,
        "model_type": None,
        "config": None,
        "tx_init": None,
        "python_numbers": python_numbers(items),
        "weak": weak_leaves(items),
    }
    options = replace(options, meta=meta)
    return store(state.step, save_directory, items, options, leaves=leaves)


def load_train_state(
    target: Any,
    reference: str | os.PathLike[str],
    *,
    step: SupportsIndex | None,
    optimizer: str,
    iterators: Mapping[str, Any] | None,
    damaged: OnDamage,
) -> Any:
    """Return a stored state with the structure and shardings of a target.

    `TrainState.load_state` describes the arguments.

    Raises:
        FileNotFoundError: if there is no such run, alias or step.
        ValueError: if the checkpoint does not fit; all differences are listed.
    """
    if optimizer not in ("require", "skip"):
        raise ArgumentError(path="optimizer", expected="'require' or 'skip'", found=repr(optimizer))
    checkpoint = StoredCheckpoint.open(reference, step=step, damaged=damaged)
    targets = {"model": _as_item(target.params)}
    if optimizer == "require" and _needs_optimizer(checkpoint, target.opt_state):
        targets["optimizer"] = _as_item(target.opt_state)
    if jax.tree.leaves(target.added_fields) or "fields" in checkpoint.items:
        targets["fields"] = target.added_fields
    # Some optimizers change dtypes of their state in the first step.
    forms = {
        item: NumberForms(checkpoint, item, tree, stored_dtypes=item == "optimizer")
        for item, tree in targets.items()
    }
    checkpoint.check({item: form.check for item, form in forms.items()})
    positions = checkpoint.positions(iterators, resumes=optimizer == "require")
    finished = {
        item: form.finished(checkpoint.restore(item, form.ask)) for item, form in forms.items()
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
    positions.set()
    return loaded


def _needs_optimizer(checkpoint: StoredCheckpoint, opt_state: Any) -> bool:
    """Return whether checkpoint and target both have optimizer state; False if neither has.

    Raises:
        OptimizerNotFoundError: if only the target has it.
        OptimizerError: if only the checkpoint has it.
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
    """Return a tree in its stored form: a single leaf is put into a dict, so that it has a path."""
    return {_ONLY: tree} if _is_leaf(tree) else tree


def _from_item(item: Any, like: Any) -> Any:
    return item[_ONLY] if _is_leaf(like) else item


def _is_leaf(tree: Any) -> bool:
    leaf: Any = jax.tree.structure(0)
    return bool(jax.tree.structure(tree) == leaf)
