"""Contents of a saved training state, for `EasyDeLState` and `TrainState`.

A checkpoint has the items `model` (all variables of the module), `optimizer` and `fields` (those
that a subclass adds), as nested dicts. Its `meta` is the JSON that a load needs to rebuild the
state. For a model with adapters there may also be the item `merged`: the model with the adapters
merged into its weights.
"""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cairn.counts import count_text
from cairn.interop.config.frozen import FrozenJSON
from cairn.interop.dtypes import floating_dtype
from cairn.interop.errors import ArgumentError
from cairn.interop.weights.export import MERGED_ITEM
from cairn.state.adapters.layers import check_mergeable
from cairn.state.adapters.models import abstract_model
from cairn.state.adapters.quantized_weight import map_parameters
from cairn.state.checkpointing.checkpointer import Checkpointer
from cairn.state.checkpointing.gc_pause import pause_gc
from cairn.state.checkpointing.modules import FlatTrees
from cairn.state.checkpointing.processes import agreement
from cairn.state.checkpointing.save_handle import SaveHandle, call_of_save
from cairn.state.checkpointing.save_options import SaveOptions
from cairn.state.checkpointing.trees import flatten
from cairn.state.errors import TreeStructureError
from cairn.state.paths import arrays_among, tree_problems
from cairn.state.states.checkpoint import META_FORMAT, META_VERSION
from cairn.state.states.description import ModelDescription, describe, items_of
from cairn.state.states.loadable import refuse_unloadable
from cairn.state.states.memory_kinds import offloaded_leaves
from cairn.state.states.number_forms import python_numbers, weak_leaves
from cairn.state.states.progress import print_progress, size_text
from cairn.state.states.stored_fields import field_forms
from cairn.storage.runs.records.annotations import Annotation
from cairn.storage.runs.records.layout import check_step, parse_ref
from cairn.storage.runs.records.manifest import ModelInfo
from cairn.storage.store.clock import is_above_zero
from cairn.storage.store.deadlines import deadline_after, deadline_seconds_left
from cairn.storage.store.uri import StoreURI

__all__ = [
    "SkippedSave",
    "StateSaveOptions",
    "check_loadable",
    "check_options",
    "save_easydel_state",
    "store",
]


@dataclass(frozen=True, kw_only=True)
class StateSaveOptions(SaveOptions):
    """Options of `EasyDeLState.save_state`; its docstring describes each."""

    float_dtype: Any = None
    verbose: bool = True
    mismatch_allowed: bool = True
    save_optimizer: bool = True
    enable: bool | None = None
    step: SupportsIndex | None = None
    wait: bool = False
    extras: Mapping[str, Any] | None = None
    merge_lora: bool = False


class SkippedSave(SaveHandle):
    """Handle of a save with `enable=False`: it has ended, nothing is stored, its attempt is 0."""

    def __init__(self, *, step: int, uri: StoreURI) -> None:
        super().__init__(step=step, attempt=0, uri=uri)
        self.skip()

    def __repr__(self) -> str:
        return f"SkippedSave(step={self.step}, {self.uri})"


@call_of_save()
def save_easydel_state(
    state: Any, save_directory: str | os.PathLike[str], options: StateSaveOptions
) -> SaveHandle:
    """Save a state to a run.

    Args:
        state: an `EasyDeLState`.
        save_directory: the run.
        options: options of `save_state`.

    Raises:
        TreeStructureError: if the model differs from its config and `mismatch_allowed=False`.
        ConfigError: if `load_state` could never load the state.
        ArgumentError: if an argument is invalid, or differs between processes.
        StorageError: if the save fails.
    """
    with pause_gc():  # a collection would visit all objects made here and free none
        items: Mapping[str, Any] | None
        described, leaves, items = describe(
            state, optimizer=bool(options.save_optimizer) and state.opt_state is not None
        )
        if items is None or options.float_dtype is not None or not options.mismatch_allowed:
            optimizer = state.opt_state if options.save_optimizer else None
            trees = items_of(state.graphstate, state.graphother, optimizer, state.added_fields)
            if not options.mismatch_allowed:
                _check_against_config(described, trees["model"])
            if options.float_dtype is not None:
                trees["model"] = cast_parameters(trees["model"], options.float_dtype)
            items, leaves = trees, jax.tree.leaves(trees)
        merged = None
        if options.merge_lora:
            model = state.merge(state.graphstate)
            _check_adapters(model)
            merged = functools.partial(_merged, model, options.float_dtype)
        meta: dict[str, Any] = {
            **described.meta,
            "tx_init": state.tx_init,
            "hyperparameters": state.hyperparameters,
            "weak": weak_leaves(items),
            "memory_kinds": offloaded_leaves(items, leaves),
        }
        check = None
        if options.enable is None or options.enable:
            check = refuse_unloadable(state, described, items["model"])
        if state.added_fields:
            meta["fields"] = field_forms(state)
            meta["python_numbers"] = python_numbers({"fields": state.added_fields})
        info = ModelInfo(
            model_type=meta["model_type"],
            model_class=meta["model_class"],
            config=meta["config"] or {},
        )
        assets = dict(getattr(described.config, "tokenizer_files", None) or {})
    options = replace(options, meta=meta, model=info, assets=assets, check=check)
    return store(state.step, save_directory, items, options, leaves=leaves, merged=merged)


def _check_adapters(model: Any) -> None:
    if getattr(model, "lora", None) is None:
        raise ArgumentError(
            path="save_state: merge_lora",
            expected="a model with adapters",
            found=f"a {type(model).__name__} that has none",
            next_step="leave it out: the model is stored as it is served",
        )
    check_mergeable(model)


def _merged(model: Any, float_dtype: Any) -> Any:
    """Merge the adapters of a model in place; return its variables.

    They are cast to `float_dtype` unless it is None.
    """
    tree = nnx.state(model.unwrap_lora_to_layers())
    return tree if float_dtype is None else cast_parameters(tree, float_dtype)


def check_loadable(state: Any) -> None:
    """Check, before the first save, that `load_state` will be able to load this state.

    A TrainState can always be loaded.

    Raises:
        ConfigError: if the model could not be rebuilt from its stored description.
    """
    if hasattr(state, "graphstate"):
        # The description is cached for the first save.
        described, _, items = describe(state, optimizer=state.opt_state is not None)
        tree = (
            nnx.merge_state(state.graphstate, state.graphother) if items is None else items["model"]
        )
        check = refuse_unloadable(state, described, tree)
        if check is not None:
            check()


def check_options(state: Any, options: Mapping[str, Any], *, call: str) -> None:
    """Check, before the first save, options for the state's `save_state`.

    Args:
        state: the state.
        options: arguments of its `save_state`.
        call: name of the method that documents them, for the error.

    Raises:
        ArgumentError: if `save_state` has no such argument, or `merge_lora` is given and there are
            no adapters.
    """
    try:
        own = {"step": None, "metrics": None, "labels": None, "extras": None}
        inspect.signature(state.save_state).bind("run", **own, **options)
    except TypeError as exc:
        raise ArgumentError(
            path="save_options",
            expected=f"arguments of {call}",
            found=str(exc).removeprefix("got "),
            next_step="correct them, or leave them out",
        ) from exc
    if options.get("merge_lora") and hasattr(state, "graphstate"):
        _check_adapters(state.merge(state.graphstate))


def store(
    state_step: Any,
    save_directory: str | os.PathLike[str],
    items: Mapping[str, Any],
    options: StateSaveOptions,
    *,
    leaves: Sequence[Any],
    merged: Callable[[], Any] | None = None,
) -> SaveHandle:
    """Start a save of any kind of state with the run's checkpointer; return its handle.

    Args:
        state_step: the state's step.
        save_directory: the run.
        items: trees by name.
        options: options of `save_state`, with the meta that `load_state` reads.
        leaves: all leaves of the items.
        merged: function that returns the tree of the item `merged`; called after all processes
            have agreed to save. None without that item.

    Raises:
        ArgumentError: if an argument is invalid, or differs between processes.
        StorageError: if the save fails.
    """
    dtype = options.float_dtype

    def prepare() -> tuple[StoreURI, int, dict[str, Any], bool]:
        flags = ("verbose", "mismatch_allowed", "save_optimizer", "wait", "overwrite", "merge_lora")
        for name in flags:
            _flag(name, getattr(options, name))
        enabled = options.enable is None or _flag("enable", options.enable)
        _refuse_no_time(options.deadline)
        Annotation.of(options.labels, None)  # raises, if it can't be kept
        _refuse_donated([state_step, *leaves])
        step = _number(state_step) if options.step is None else check_step(options.step)
        meta = {
            "format": META_FORMAT,
            "version": META_VERSION,
            **FrozenJSON(options.meta, name="meta").to_dict(),
            "extras": FrozenJSON(options.extras, name="extras").to_dict(),
            "float_dtype": floating_dtype(dtype, argument="float_dtype").name
            if dtype is not None
            else None,
            "step": step,
        }
        return _run_uri(save_directory), step, meta, enabled

    def same(prepared: tuple[StoreURI, int, dict[str, Any], bool]) -> dict[str, Any]:
        run, step, meta, enabled = prepared
        return {
            "enable": enabled,
            "save_directory": str(run),
            "step": step,
            "float_dtype": meta["float_dtype"],
            "save_optimizer": sorted(items),
            "overwrite": bool(options.overwrite),
            "labels": dict(options.labels or {}),
            "extras": meta["extras"],
            "merge_lora": merged is not None,
        }

    run, step, meta, enabled = agreement.all_or_none(prepare, same=same, error=ArgumentError)
    if not enabled:
        print_progress(options.verbose, f"save of step {step} to {run}: skipped (enable=False)")
        return SkippedSave(step=step, uri=run)
    if merged is not None:
        tree = merged()
        if isinstance(items, FlatTrees):
            items = FlatTrees({**items, MERGED_ITEM: flatten(tree)})
        else:
            items = {**items, MERGED_ITEM: tree}
    with deadline_after(options.deadline):
        handle = Checkpointer.for_run(run).save_with(
            step, items, replace(options, meta=meta, deadline=None)
        )
        print_progress(
            options.verbose,
            f"saving step {step} ({size_text(handle.nbytes)}) to {handle.uri}; "
            f"training waited {handle.blocked_seconds:.3f} s",
        )
        if options.wait:
            handle.wait(deadline_seconds_left())
            print_progress(options.verbose, f"step {step} is durable")
    return handle


def _flag(name: str, value: Any) -> bool:
    """Return a flag as a bool; raise ArgumentError for other types, as the text "false" is true."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(
            path=f"save_state: {name}",
            expected="True or False",
            found=repr(value),
            next_step="convert it with bool() if that says what you mean",
        )
    return bool(value)


def _refuse_no_time(deadline: Any) -> None:
    if deadline is not None and not is_above_zero(deadline):
        raise ArgumentError(
            path="save_state: deadline",
            expected="seconds above 0, or None to wait while there is progress",
            found=repr(deadline),
            next_step="give a number of seconds, such as 30",
        )


def _refuse_donated(leaves: Sequence[Any]) -> None:
    gone = sum(leaf.is_deleted() for leaf in arrays_among(leaves))
    if gone:
        raise ArgumentError(
            path="save_state",
            expected="a state whose arrays are there",
            found=f"{gone} arrays that are gone: a step was given this state's memory (donation)",
            next_step="save the state that the step returned",
        )


def _number(state_step: Any) -> int:
    if np.ndim(state_step) != 0:
        raise ArgumentError(
            path="save_state: the state's step",
            expected="one number",
            found=f"an array of shape {np.shape(state_step)}, as of several states in one",
            next_step="pass step=, or save each of the states by itself",
        )
    return int(state_step)


def cast_parameters(tree: Any, dtype: Any) -> Any:
    """Return a model's tree with its floating parameters cast to a dtype; shardings stay the same.

    Quantized weights are not cast.

    Raises:
        ArgumentError: if the dtype is not a floating one.
    """
    target = floating_dtype(dtype, argument="float_dtype")

    def cast(leaf: Any) -> Any:
        return leaf.astype(target) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return map_parameters(cast, tree)


def _run_uri(save_directory: str | os.PathLike[str]) -> StoreURI:
    ref = parse_ref(os.fspath(save_directory))
    if (ref.alias, ref.step, ref.best) != (None, None, None):
        raise ArgumentError(
            path=str(save_directory),
            expected="the URI of a run",
            found="a checkpoint of one",
            next_step=f"save to {ref.run}; step= gives the number",
        )
    return ref.run


def _check_against_config(described: ModelDescription, tree: Any) -> None:
    model_class, config, meta = described
    if config is None:
        raise ArgumentError(
            path="mismatch_allowed", expected="a model with a config", found=model_class.__name__
        )
    built = abstract_model(model_class, config, meta["module"])
    problems = tree_problems(nnx.state(built), tree)
    if problems:
        raise TreeStructureError(
            count_text(len(problems), "leaf differs", "leaves differ")
            + " from what the config describes",
            path=model_class.__name__,
            expected="the model that its config builds",
            next_step="correct the config, or save with mismatch_allowed=True",
            problems=problems,
        )
