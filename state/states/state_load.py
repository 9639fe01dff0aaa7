"""Load of training states: from a run's checkpoint onto any mesh, or from Hugging Face weights.

A load first builds the target without arrays: the model from its stored config, the optimizer
state by `jax.eval_shape`, and a sharding for each leaf. If the checkpoint does not fit the target,
one error lists all differences. Then each process reads what its devices hold, straight into place.
"""

import os
import re
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.dtypes import floating_dtype
from cairn.interop.errors import ArgumentError, UnknownModelError
from cairn.interop.names import TaskType
from cairn.interop.weights.hub_folder import HUB_SCHEME
from cairn.state.adapters.models import abstract_model
from cairn.state.adapters.quantized_weight import map_parameters
from cairn.state.checkpointing.processes import agreement
from cairn.state.errors import OptimizerError, OptimizerNotFoundError
from cairn.state.model_classes import find, shipped_decoder
from cairn.state.paths import variable_paths
from cairn.state.sharding.mesh import home_of
from cairn.state.sharding.optimizers import optimizer_shardings
from cairn.state.sharding.rules import module_plan
from cairn.state.sharding.stable_placement import settled
from cairn.state.sharding.states import beside, place_step
from cairn.state.states.checkpoint import StoredCheckpoint
from cairn.state.states.load_options import LoadOptions
from cairn.state.states.load_placement import apply_shard_fns, check_shard_fns
from cairn.state.states.memory_kinds import in_memory
from cairn.state.states.number_forms import NumberForms
from cairn.state.states.optimizers import (
    given_optimizer,
    init_optimizer,
    optimizer_from_description,
)
from cairn.state.states.progress import print_progress, size_text
from cairn.state.states.quantized_load import fill_model, quantizes, refuse_float_optimizer
from cairn.state.states.stored_fields import field_targets, static_values
from cairn.storage.errors import InvalidURIError, RunNotFoundError
from cairn.storage.runs.records.layout import RUN_FILE, parse_ref
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.uri import StoreURI

__all__ = [
    "is_pretrained",
    "is_run",
    "load_easydel_state",
    "load_module",
    "load_optimizer_into",
    "may_be_hub_id",
]

State = TypeVar("State")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_pretrained(reference: str | os.PathLike[str]) -> bool:
    """Return whether a reference names Hugging Face weights rather than a checkpoint of a run.

    Hugging Face weights are a GGUF file, a folder (local or in a store) with a config.json that is
    no run, or a hub repository ("hf://owner/name"). "owner/name" is a path, so that a misspelt path
    does not cause a request to the hub.
    """
    text = os.fspath(reference)
    if text.endswith(".gguf") or text.startswith(HUB_SCHEME):
        return True
    if "://" in text:
        ref = parse_ref(text)
        objects = ObjectStore.open(ref.run)
        named = (ref.alias, ref.step, ref.best) != (None, None, None)
        return not named and not objects.read(RUN_FILE) and bool(objects.read("config.json"))
    path = Path(text)
    return path.is_dir() and (path / "config.json").is_file() and not (path / RUN_FILE).exists()


def may_be_hub_id(reference: str | os.PathLike[str]) -> bool:
    """Return whether a reference could be a hub id ("owner/name") and is no local path."""
    text = os.fspath(reference)
    return _HUB_ID.fullmatch(text) is not None and not Path(text).exists()


def is_run(reference: str | os.PathLike[str] | StoreURI) -> bool:
    """Return whether a reference names an existing run, or a checkpoint of one."""
    try:
        ref = parse_ref(str(reference))
    except InvalidURIError:
        return False
    return ObjectStore.open(ref.run).read(RUN_FILE) is not None


def load_easydel_state(
    state_class: type[State],
    reference: str | os.PathLike[str],
    options: LoadOptions,
) -> State:
    """Load an `EasyDeLState`; `LoadOptions` describes each argument.

    Raises:
        FileNotFoundError: if there is no such run, alias, step or folder.
        ValueError: if arguments contradict each other or the checkpoint does not fit.
        CorruptionError: if stored bytes fail their checksum.
    """
    if is_pretrained(reference):
        return _from_pretrained(state_class, reference, options)
    _refuse_pickle(reference)
    try:
        checkpoint = StoredCheckpoint.open(reference, step=options.step, damaged=options.damaged)
    except RunNotFoundError as error:
        raise _naming_the_hub(error, reference) from None
    options.refuse_hub()
    meta = checkpoint.meta
    model = _agreed_target(checkpoint, options)
    _, params, other = nnx.split(model, _trainable(checkpoint, model), ...)
    with_optimizer = options.optimizer == "require" and "optimizer" in checkpoint.items
    if with_optimizer and quantizes(checkpoint, options.quantization):
        refuse_float_optimizer(checkpoint, model)
    tx, tx_init = _optimizer(checkpoint, options, needed=with_optimizer)
    targets = {"model": nnx.merge_state(params, other)}
    if with_optimizer and tx is not None:
        targets["optimizer"] = checkpoint.targets(
            "optimizer",
            init_optimizer(tx, params),
            stored_dtypes=options.param_dtype is None,
        )
    casts = frozenset(targets) if options.param_dtype is not None else frozenset[str]()
    make: Any = state_class
    abstract = make(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        graphdef=nnx.graphdef(model),
        graphstate=params,
        graphother=other,
        tx=tx,
        opt_state=targets.get("optimizer"),
        **dict.fromkeys([*make.added_field_names(), *make.added_field_names(static=True)]),
    )
    fields = field_targets(checkpoint, abstract, options.fields)
    static = static_values(abstract, options.fields)
    make.check_fields({**fields, **static}, path="load_state")
    numbers = NumberForms(checkpoint, "fields", fields)
    with_fields = options.fields != "skip" and "fields" in checkpoint.items
    if with_fields or jax.tree.leaves(fields):
        targets["fields"] = numbers.check
    checkpoint.check(targets, casts=casts)
    positions = checkpoint.positions(options.iterators, resumes=options.optimizer == "require")
    print_progress(
        options.verbose,
        f"loading step {checkpoint.info.step} ({size_text(checkpoint.manifest.nbytes)}) "
        f"from {checkpoint.uri}",
    )
    opt_state = None
    if "optimizer" in targets:
        opt_state = checkpoint.restore("optimizer", targets["optimizer"], cast=bool(casts))
    if "fields" in targets:
        fields = numbers.finished(checkpoint.restore("fields", numbers.ask))
    model = fill_model(checkpoint, model, options.quantization, cast=bool(casts))
    model = apply_shard_fns(model, options.shard_fns)
    graphdef, params, other = nnx.split(model, _trainable(checkpoint, model), ...)
    if options.shard_fns and opt_state is not None:
        places = optimizer_shardings(opt_state, params)
        opt_state = jax.device_put(opt_state, jax.tree.map(_in_its_memory, opt_state, places))
    if options.shard_fns:
        fields = beside(fields, params)
    state: State = make(
        step=place_step(meta["step"], home_of(params)),
        graphdef=graphdef,
        graphstate=params,
        graphother=other,
        tx=tx,
        opt_state=opt_state,
        hyperparameters=meta.get("hyperparameters") or {},
        tx_init=tx_init,
        **fields,
        **static,
    )
    state = settled(state)
    object.__setattr__(state, "_extras", dict(meta.get("extras") or {}))
    positions.set()
    return state


def load_module(
    reference: str | os.PathLike[str],
    options: LoadOptions,
    *,
    expected_class: type[Any] | None = None,
) -> Any:
    """Return only the model of a run's checkpoint.

    If the step was saved with `merge_lora=True`, this is the merged model.

    Args:
        reference: the run, or one of its checkpoints.
        options: arguments of the load; those about the optimizer have no effect.
        expected_class: class that the model must be an instance of; None for any.

    Raises:
        FileNotFoundError: if there is no such run, alias or step.
        ValueError: if arguments contradict each other or the checkpoint does not fit.
        CorruptionError: if stored bytes fail their checksum.
    """
    if options.iterators:
        raise ArgumentError(
            path="iterators",
            expected="a load of a whole state",
            found=f"{', '.join(map(str, options.iterators))}, with a load of the model alone",
            next_step="load with load_state, or leave iterators= out",
        )
    checkpoint = StoredCheckpoint.open(
        reference, step=options.step, damaged=options.damaged
    ).served()
    options.refuse_hub()
    model = _agreed_target(checkpoint, options)
    if expected_class is not None and not isinstance(model, expected_class):
        raise ArgumentError(
            path=checkpoint.uri,
            expected=f"a checkpoint of a {expected_class.__name__}",
            found=f"one of a {type(model).__name__}",
            next_step="call from_pretrained on that class, or on EasyDeLBaseModule",
        )
    item = checkpoint.model_item
    casts = frozenset({item}) if options.param_dtype is not None else frozenset[str]()
    checkpoint.check({item: nnx.state(model)}, casts=casts)
    print_progress(
        options.verbose, f"loading the model of step {checkpoint.info.step}: {checkpoint.uri}"
    )
    model = fill_model(checkpoint, model, options.quantization, cast=bool(casts))
    return apply_shard_fns(model, options.shard_fns)


def load_optimizer_into(state: Any, reference: str | os.PathLike[str]) -> Any:
    """Return a state with the optimizer state of a checkpoint, sharded like its parameters.

    Raises:
        OptimizerNotFoundError: if the checkpoint has no optimizer state; it is a FileNotFoundError.
        OptimizerError: if the state has no optimizer and the checkpoint does not describe one.
        TreeMismatchError: if the stored optimizer state does not fit; lists all differences.
    """
    _refuse_pickle(reference)
    checkpoint = StoredCheckpoint.open(reference)
    if "optimizer" not in checkpoint.items:
        raise OptimizerNotFoundError(
            path=checkpoint.uri,
            expected="an item 'optimizer'",
            found=f"items {', '.join(checkpoint.items)}",
            next_step="it was saved without optimizer state; init_tx makes a fresh one",
        )
    tx, tx_init = state.tx, state.tx_init
    if tx is None:
        tx, tx_init = _optimizer(checkpoint, LoadOptions(), needed=True)
    assert tx is not None
    abstract = jax.tree.map(_abstract, state.graphstate)
    target = checkpoint.targets("optimizer", init_optimizer(tx, abstract))
    checkpoint.check({"optimizer": target})
    return state.replace(tx=tx, tx_init=tx_init, opt_state=checkpoint.restore("optimizer", target))


def _agreed_target(checkpoint: StoredCheckpoint, options: LoadOptions) -> Any:
    """Return the target model, after a check that it is the same on all processes."""
    return agreement.all_or_none(
        _target_model,
        checkpoint,
        options,
        same=lambda model: {"load_state": [*map(str, jax.tree.leaves(nnx.state(model)))]},
        error=ArgumentError,
    )


def _target_model(checkpoint: StoredCheckpoint, options: LoadOptions) -> Any:
    """Return the model to load, whose leaves have shapes, dtypes and shardings, but no arrays."""
    meta = checkpoint.meta
    if meta.get("config") is None or meta.get("model_class") is None:
        raise UnknownModelError(
            path=checkpoint.uri,
            expected="a checkpoint of an EasyDeLBaseModule with a config",
            found=f"model class {meta.get('model_class')!r}, no config",
            next_step="build the state yourself and read the arrays with cairn.storage",
        )
    model_class = options.model_class or find(
        meta["model_class"], meta.get("model_module"), path=checkpoint.uri
    )
    _check_task(model_class, options.model_task)
    config = AutoEasyDeLConfig.from_dict(meta["config"])
    assets = checkpoint.assets()
    config = config.replace(**options.config_updates(config), tokenizer_files=assets)
    stored = dict(meta.get("module") or {})
    settings = {**stored, **options.settings(stored)}
    if quantizes(checkpoint, options.quantization):
        # Quantize it without arrays once, to raise errors before anything is read.
        quantization = options.quantization.settings.to_dict()
        abstract_model(model_class, config, {**settings, "quantization": quantization})
    model = abstract_model(model_class, config, settings)
    tree = nnx.state(model)
    if not quantizes(checkpoint, options.quantization):
        check_shard_fns(options.shard_fns, tree)
    mesh = options.target_mesh()
    if mesh is not None:
        report = module_plan(tree, config, options.partition_rules, mesh)
        places = report.raise_for_problems().shardings(tree)
    else:
        places = jax.tree.map(lambda leaf: options.target_device(), tree)
    tree = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        tree,
        places,
    )
    tree = checkpoint.targets(checkpoint.model_item, tree)
    if options.param_dtype is not None:
        tree = _with_param_dtype(tree, options.param_dtype)
    nnx.update(model, tree)
    return model


def _with_param_dtype(tree: Any, param_dtype: Any) -> Any:
    dtype = floating_dtype(param_dtype, argument="param_dtype")

    def cast(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)

    return map_parameters(cast, tree)


def _optimizer(
    checkpoint: StoredCheckpoint, options: LoadOptions, *, needed: bool
) -> tuple[Any, Any]:
    """Return the optimizer and its description; (None, None) if there is none, given or stored.

    Raises:
        OptimizerError: if there is none and it is needed.
    """
    tx, tx_init = given_optimizer(options.tx, options.tx_init)
    if tx is not None:
        return tx, tx_init
    tx_init = checkpoint.meta.get("tx_init")
    if tx_init is not None:
        return optimizer_from_description(tx_init), tx_init
    if needed:
        raise OptimizerError(
            path=checkpoint.uri,
            expected="the optimizer that the stored optimizer state belongs to",
            found="neither tx= nor a stored description (tx_init)",
            next_step="pass tx=, or tx_init=, or optimizer='skip' to load without it",
        )
    return None, None


def _from_pretrained(
    state_class: type[State],
    reference: str | os.PathLike[str],
    options: LoadOptions,
) -> State:
    if options.step is not None:
        raise ArgumentError(
            path="step", expected="a checkpoint of a run", found=f"{os.fspath(reference)!r}"
        )
    if options.fields not in (None, "skip"):
        raise ArgumentError(
            path="fields", expected="a checkpoint of a run", found=f"{os.fspath(reference)!r}"
        )
    if options.iterators:
        raise ArgumentError(
            path="iterators", expected="a checkpoint of a run", found=f"{os.fspath(reference)!r}"
        )
    if options.damaged != "refuse":
        raise ArgumentError(
            path="damaged", expected="a checkpoint of a run", found=f"{os.fspath(reference)!r}"
        )
    model_class = options.model_class or shipped_decoder()
    _check_task(model_class, options.model_task)
    model = model_class.from_pretrained(reference, **options.for_pretrained())
    whole: Any = state_class
    tx, tx_init = given_optimizer(options.tx, options.tx_init)
    state: State = whole.create(
        model=apply_shard_fns(model, options.shard_fns),
        tx=tx,
        tx_init=tx_init,
        init_opt_state=tx is not None,
    )
    return state


def _naming_the_hub(error: RunNotFoundError, reference: str | os.PathLike[str]) -> RunNotFoundError:
    """Return the error, with a next step that names the hub repository that may be meant."""
    if not may_be_hub_id(reference):
        return error
    text = os.fspath(reference)
    return RunNotFoundError(
        "no such run",
        path=error.path,
        expected=error.expected,
        found=error.found,
        next_step=f"{error.next_step} The hub's repository of this name is {HUB_SCHEME}{text}.",
    )


def _check_task(model_class: type[Any], model_task: TaskType | str) -> None:
    task = TaskType(model_task)
    own = getattr(model_class, "model_task", TaskType.BASE_MODULE)
    if task not in (TaskType.AUTO_BIND, own):
        raise ArgumentError(
            path="model_task",
            expected=f"{str(own)!r}, what {model_class.__name__} is for, or 'auto-bind'",
            found=repr(str(task)),
        )


def _refuse_pickle(reference: str | os.PathLike[str]) -> None:
    path = Path(os.fspath(reference))
    if "://" in os.fspath(reference) or not path.is_dir() or (path / RUN_FILE).exists():
        return
    pickles = sorted(
        entry.name for entry in path.iterdir() if entry.suffix in (".pickle", ".pkl", ".easy")
    )
    if pickles:
        raise ArgumentError(
            path=str(path),
            expected="a run saved by save_state",
            found=f"pickle files: {', '.join(pickles)}",
            next_step="a state's pickle can run code and is never read; save again with save_state",
        )


def _trainable(checkpoint: StoredCheckpoint, model: Any) -> Any:
    """Return an NNX filter of the trained variables: those of the saved state, else the model's.

    Raises:
        ArgumentError: the model lacks some of these, for example because it is quantized.
    """
    stored = checkpoint.meta.get("trainable")
    if stored is None:
        return getattr(model, "trainable_filter", nnx.Param)
    trained = frozenset(stored)
    missing = trained - set(variable_paths(nnx.state(model)))
    if missing:
        raise ArgumentError(
            f"{len(missing)} of the {len(trained)} variables that were trained are not there",
            path=checkpoint.uri,
            expected="the model as it was saved",
            found="one with other variables",
            next_step="load it without quantization, or train a state made of the loaded model",
            problems=sorted(missing)[:20],
        )
    return lambda path, value: "/".join(map(str, path)) in trained


def _in_its_memory(leaf: Any, place: Any) -> Any:
    return None if place is None else in_memory(place, leaf.sharding.memory_kind)


def _abstract(leaf: Any) -> Any:
    # An uncommitted array's sharding is no requirement.
    place = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
