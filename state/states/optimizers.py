"""Optax optimizers: as JSON, so that a checkpoint can rebuild its own, and their first state.

Only names on the lists below can be built; nothing in a description is ever executed.

    {"name": "adamw", "learning_rate": 1e-4, "weight_decay": 0.01, "max_grad_norm": 1.0}
    {"name": "sgd", "momentum": 0.9,
     "learning_rate": {"schedule": "linear", "init_value": 1e-3, "end_value": 0.0,
                       "transition_steps": 1000}}
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import optax

from cairn.interop.config.frozen import FrozenJSON
from cairn.state.adapters.quantized_weight import check_trainable
from cairn.state.errors import OptimizerError
from cairn.state.sharding.optimizers import optimizer_shardings

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "given_optimizer",
    "init_optimizer",
    "init_program",
    "make_optimizer",
    "optax_numerics",
    "optimizer_from_description",
]

OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "adafactor": optax.adafactor,
    "adagrad": optax.adagrad,
    "adam": optax.adam,
    "adamw": optax.adamw,
    "lamb": optax.lamb,
    "lion": optax.lion,
    "nadamw": optax.nadamw,
    "radam": optax.radam,
    "rmsprop": optax.rmsprop,
    "sgd": optax.sgd,
}

SCHEDULES: Mapping[str, Callable[..., Any]] = {
    "constant": optax.constant_schedule,
    "cosine_decay": optax.cosine_decay_schedule,
    "exponential_decay": optax.exponential_decay,
    "linear": optax.linear_schedule,
    "warmup_constant": optax.warmup_constant_schedule,
    "warmup_cosine_decay": optax.warmup_cosine_decay_schedule,
}

_DTYPE_ARGUMENTS = frozenset({"mu_dtype", "accumulator_dtype", "dtype_momentum"})
_WRAPPERS = ("max_grad_norm", "accumulate_steps")


def make_optimizer(
    name: str, **arguments: Any
) -> tuple[optax.GradientTransformation, dict[str, Any]]:
    """Build an Optax optimizer, and the JSON that rebuilds it.

    Args:
        name: one of `OPTIMIZERS`.
        **arguments: the optimizer's own, as JSON values. `learning_rate` may be a schedule:
            {"schedule": one of `SCHEDULES`, ...its arguments}. Two more are ours:
            `max_grad_norm` clips the global norm of the gradients first; `accumulate_steps`
            applies an update every so many steps, from the mean of the gradients.

    Returns:
        The optimizer and its description, as `EasyDeLState.create(tx=..., tx_init=...)` takes
        them. Equal descriptions give the same optimizer object, so that a jitted step compiled
        for one is used for the other.

    Raises:
        OptimizerError: if the name or an argument is unknown, or a value is none that it takes.
    """
    description = FrozenJSON({"name": name, **arguments}, name="optimizer description")
    return _build(description), description.to_dict()


def optimizer_from_description(tx_init: Mapping[str, Any]) -> optax.GradientTransformation:
    """Rebuild the optimizer that `make_optimizer` described.

    Raises:
        OptimizerError: if the description names anything unknown.
    """
    return _build(FrozenJSON(tx_init, name="tx_init"))


def given_optimizer(
    tx: optax.GradientTransformation | None, tx_init: Mapping[str, Any] | None
) -> tuple[optax.GradientTransformation | None, Mapping[str, Any] | None]:
    """Return the optimizer that `tx` or `tx_init` gives, and its description.

    Raises:
        OptimizerError: if there is only a description, and it names anything unknown.
    """
    if tx is None and tx_init is not None:
        tx = optimizer_from_description(tx_init)
    return tx, tx_init


@functools.lru_cache(maxsize=64)
def _build(description: FrozenJSON) -> optax.GradientTransformation:
    arguments = description.to_dict()
    name = arguments.pop("name", None)
    factory = OPTIMIZERS.get(name) if isinstance(name, str) else None
    if factory is None:
        raise OptimizerError(
            path="optimizer", expected=f"one of {', '.join(OPTIMIZERS)}", found=repr(name)
        )
    max_grad_norm = arguments.pop("max_grad_norm", None)
    accumulate_steps = arguments.pop("accumulate_steps", None)
    _check_arguments(f"optimizer {name!r}", factory, arguments, extra=_WRAPPERS)
    for key, value in arguments.items():
        if key == "learning_rate":
            arguments[key] = _schedule(value)
        elif key in _DTYPE_ARGUMENTS and value is not None:
            arguments[key] = _dtype(key, value)
        else:
            _refuse_text(key, value)
    tx: optax.GradientTransformation = _call(f"optimizer {name!r}", factory, arguments)
    if max_grad_norm is not None:
        is_number = isinstance(max_grad_norm, int | float) and not isinstance(max_grad_norm, bool)
        if not is_number or max_grad_norm <= 0:
            raise OptimizerError(
                path="max_grad_norm", expected="a number above 0", found=repr(max_grad_norm)
            )
        tx = optax.chain(optax.clip_by_global_norm(float(max_grad_norm)), tx)
    if accumulate_steps is not None:
        if type(accumulate_steps) is not int or accumulate_steps < 1:
            raise OptimizerError(
                path="accumulate_steps",
                expected="a whole number, 1 or more",
                found=repr(accumulate_steps),
            )
        tx = optax.MultiSteps(tx, every_k_schedule=accumulate_steps).gradient_transformation()
    return tx


def _schedule(value: Any) -> Any:
    if not isinstance(value, Mapping):
        _refuse_text("learning_rate", value)
        return value
    arguments = dict(value)
    name = arguments.pop("schedule", None)
    factory = SCHEDULES.get(name) if isinstance(name, str) else None
    if factory is None:
        raise OptimizerError(
            path="learning_rate.schedule",
            expected=f"one of {', '.join(SCHEDULES)}",
            found=repr(name),
        )
    _check_arguments(f"schedule {name!r}", factory, arguments)
    return _call(f"schedule {name!r}", factory, arguments)


def _call(what: str, factory: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return factory(**arguments)
    except (TypeError, ValueError) as error:
        raise OptimizerError(
            path=what,
            expected="arguments that Optax takes",
            found=f"{dict(arguments)}: {error}",
        ) from error


def _refuse_text(key: str, value: Any) -> None:
    """Refuse texts, which Optax would accept here, only to fail in the first step."""
    if isinstance(value, str) or (isinstance(value, Mapping) and "schedule" in value):
        raise OptimizerError(path=key, expected="a number", found=repr(value))


def _check_arguments(
    what: str,
    factory: Callable[..., Any],
    arguments: Mapping[str, Any],
    extra: tuple[str, ...] = (),
) -> None:
    parameters = inspect.signature(factory).parameters
    unknown = sorted(set(arguments) - set(parameters))
    missing = sorted(
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name not in arguments
    )
    if unknown or missing:
        raise OptimizerError(
            path=what,
            expected=f"arguments among {', '.join([*parameters, *extra])}",
            found=f"unknown: {', '.join(unknown) or 'none'}; "
            f"missing: {', '.join(missing) or 'none'}",
        )


def _dtype(key: str, value: Any) -> Any:
    try:
        return jnp.dtype(value)
    except TypeError as error:
        raise OptimizerError(
            path=key, expected="the name of a dtype, such as 'float32'", found=repr(value)
        ) from error


def init_optimizer(tx: optax.GradientTransformation, params: Any, placed: Any = None) -> Any:
    """Return the initial optimizer state, each leaf made directly on its devices.

    Abstract parameters (ShapeDtypeStructs) give an abstract state with shardings. Parameters that
    are bound to no device give a state that is not either.

    Args:
        tx: the optimizer.
        params: the parameters.
        placed: the parameters where their optimizer's leaves shall go, arrays or
            ShapeDtypeStructs; by default `params` themselves.

    Raises:
        OptimizerError: if parameters are quantized weights, which can't be trained.
    """
    check_trainable(params)
    leaves = jax.tree.leaves(params)
    with optax_numerics():
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            return tx.init(params)
        shapes = jax.eval_shape(tx.init, params)
        shardings = optimizer_shardings(shapes, params if placed is None else placed)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
            return jax.tree.map(
                lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
                shapes,
                shardings,
            )
        if placed is None and not any(getattr(leaf, "committed", False) for leaf in leaves):
            return jax.jit(tx.init)(params)
        return init_program(tx, shardings)(params)


def init_program(tx: optax.GradientTransformation, shardings: Any) -> Any:
    """Return the compiled-once function that makes an optimizer's state, each part on its device.

    Args:
        tx: the optimizer.
        shardings: where each leaf goes, as `optimizer_shardings` says.
    """
    return jax.jit(tx.init, out_shardings=shardings)


@contextmanager
def optax_numerics() -> Iterator[None]:
    """Trace the body with JAX's usual promotion of dtypes and ranks.

    Optax raises a float to an int32 step counter and broadcasts scalars, which JAX refuses under
    `jax_numpy_dtype_promotion="strict"`. A run with strict numerics keeps them for its own code:
    only the calls into Optax are traced so. The values are the same either way.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
