"""A model's forward pass as one program, compiled once for all models of the same structure."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@functools.partial(jax.jit, static_argnums=0)
def _compiled(graphdef: Any, state: Any, given: dict[str, jax.Array]) -> Any:
    return nnx.merge(graphdef, state)(**given)


def outputs_of(model: Any, ids: Any, **inputs: Any) -> Any:
    """Outputs of the model."""
    given = jax.tree.map(jnp.asarray, {"input_ids": ids, **inputs})
    return _compiled(*nnx.split(model), given)


def logits_of(model: Any, ids: Any, **inputs: Any) -> np.ndarray[Any, Any]:
    """Logits of the model, whether it returns them alone or among others."""
    outputs = outputs_of(model, ids, **inputs)
    return np.asarray(getattr(outputs, "logits", outputs))


def output_of(layer: Any, inputs: Any) -> jax.Array:
    """Output of a layer as it is now, as one program; without `jit` each operation is one."""
    output: jax.Array = jax.jit(lambda given: layer(given))(inputs)
    return output
