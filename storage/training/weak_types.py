"""Weakly typed arrays: those that JAX makes of Python numbers. Imports JAX.

Beside a bfloat16 parameter a weak float32 counts as bfloat16, a strong one makes it float32: a
learning rate that came back strong would change every number after it.
"""

import jax
from jax.extend.core.primitives import convert_element_type_p

__all__ = ["weakly_typed"]


def weakly_typed(array: jax.Array) -> jax.Array:
    """The same bits in the same place, weakly typed."""
    # No function of `jax.numpy` or `jax.lax` makes a given array weak.
    weak: jax.Array = convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )
    # On a mesh of explicit axes JAX writes the spec in another way.
    return weak if weak.sharding == array.sharding else jax.device_put(weak, array.sharding)
