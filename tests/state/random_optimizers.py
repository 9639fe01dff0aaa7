"""Random optimizers of Optax, and wrappers around them, for properties of whole trainings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from hypothesis import strategies as st

from tests.state.seams import optax_numerics

DECAY = optax.linear_schedule(1e-2, 1e-3, 10)


def matrices(params: Any) -> Any:
    """Which parameters have axes enough to be matrices."""
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params: Any) -> Any:
    """A name for each parameter: of the optimizer that has it."""
    return jax.tree.map(lambda leaf: "matrix" if leaf.ndim > 1 else "other", params)


PLAIN: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "adamw_schedule": lambda: optax.adamw(DECAY, mask=matrices),
    "adamw_bfloat16_moments": lambda: optax.adamw(1e-2, mu_dtype=jnp.bfloat16),
    "adamw_float32_moments": lambda: optax.adamw(1e-2, mu_dtype=jnp.float32),
    "sgd_momentum": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "sgd_bfloat16_trace": lambda: optax.sgd(DECAY, momentum=0.9, accumulator_dtype=jnp.bfloat16),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "lion": lambda: optax.lion(1e-3),
    "amsgrad": lambda: optax.amsgrad(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, momentum=0.9, centered=True),
    "noise": lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.sgd(1e-2)),
    "inject": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=DECAY, b1=0.8),
    "inject_float32": lambda: optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(
        learning_rate=1e-2
    ),
    "by_name": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2), "other": optax.sgd(DECAY, momentum=0.5)}, labels
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
}

WRAPPED: dict[str, Callable[[Any], Any]] = {
    "alone": lambda tx: tx,
    "clipped": lambda tx: optax.chain(optax.clip_by_global_norm(0.5), tx),
    "named": lambda tx: optax.named_chain(("nans", optax.zero_nans()), ("inner", tx)),
    "masked": lambda tx: optax.masked(tx, matrices),
    "accumulated": lambda tx: optax.MultiSteps(tx, 3).gradient_transformation(),
    "accumulated_more_and_more": lambda tx: optax.MultiSteps(
        tx, lambda step: jnp.where(step < 1, 2, 3), should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
    "if_finite": lambda tx: optax.apply_if_finite(tx, 3),
    "averaged": lambda tx: optax.chain(tx, optax.ema(0.9)),
    "flat": optax.flatten,
    "at_first": lambda tx: optax.conditionally_mask(tx, lambda step, **_: step < 3),
}

OPTIMIZERS = st.tuples(st.sampled_from(sorted(PLAIN)), st.sampled_from(sorted(WRAPPED)))
"""(plain, wrapper) by name; `build` makes one of them."""


def build(names: tuple[str, str]) -> optax.GradientTransformation:
    """The optimizer of these names."""
    plain, wrapper = names
    made: optax.GradientTransformation = WRAPPED[wrapper](PLAIN[plain]())
    return made


def is_possible(tx: optax.GradientTransformation, params: Any) -> bool:
    """Whether Optax itself takes this optimizer for such parameters, step after step.

    Where a step gives updates of another dtype than their gradients', some wrappers refuse them.
    """
    try:
        with optax_numerics():
            state = jax.eval_shape(tx.init, params)
            for _ in range(2):
                _, state = jax.eval_shape(tx.update, params, state, params)
    except TypeError:
        return False
    return True
