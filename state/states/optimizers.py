"""Optax optimizers: their description as JSON, by which a load rebuilds them, and initial state.

Only the optimizers and schedules listed below can be built: a description runs no other code.

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
    """Return an Optax optimizer, and the JSON that rebuilds it.

    Args:
        name: one of `OPTIMIZERS`.
        **arguments: the optimizer's arguments, as JSON values. `learning_rate` may be a schedule:
            {"schedule": one of `SCHEDULES`, ...its arguments}. Two more arguments are allowed for
            all: `max_grad_norm` first clips the global norm of the gradients; `accumulate_steps` is
            the number of steps whose mean gradient makes one update.

    Returns:
        The optimizer and its description, for `EasyDeLState.create(tx=..., tx_init=...)`. Equal
        descriptions give the same optimizer object, so that a jitted step compiles only once.

    Raises:
        OptimizerError: if the name or an argument is unknown, or a value is invalid.
    """
    description = FrozenJSON({"name": name, **arguments}, name="optimizer description")
    return _build(description), description.to_dict()


def optimizer_from_description(tx_init: Mapping[str, Any]) -> optax.GradientTransformation:
    """Return the optimizer of a description that `make_optimizer` returned.

    Raises:
        OptimizerError: if the name or an argument is unknown, or a value is invalid.
    """
    return _build(FrozenJSON(tx_init, name="tx_init"))


def given_optimizer(
    tx: optax.GradientTransformation | None, tx_init: Mapping[str, Any] | None
) -> tuple[optax.GradientTransformation | None, Mapping[str, Any] | None]:
    """Return `tx`, or if it is None the optimizer of the description `tx_init`; and `tx_init`.

    Both are None if both arguments are.

    Raises:
        OptimizerError: if the optimizer can't be built from the description.
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
    """Raise OptimizerError for texts and schedules: Optax would accept them and fail later."""
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
    """Return the initial state of an optimizer, with each leaf made on its devices.

    Abstract parameters (ShapeDtypeStructs) give an abstract state with shardings. Uncommitted
    parameters give an uncommitted state.

    Args:
        tx: the optimizer.
        params: the parameters.
        placed: arrays or ShapeDtypeStructs with the shardings of parameters that the optimizer's
            leaves follow; None for those of `params`.

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
    """Return the jitted function from parameters to an optimizer's initial state.

    Args:
        tx: the optimizer.
        shardings: sharding of each leaf of the state, from `optimizer_shardings`.
    """
    return jax.jit(tx.init, out_shardings=shardings)


@contextmanager
def optax_numerics() -> Iterator[None]:
    """Trace the body with JAX's standard promotion of dtypes and ranks, which Optax needs.

    Optax computes with mixed dtypes and ranks, which JAX refuses under strict promotion. With this,
    a job can use strict promotion for its own code. The results are the same.
    """
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
