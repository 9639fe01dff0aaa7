"""Weakly typed arrays, which JAX makes of Python numbers. Imports JAX.

Combined with a bfloat16 parameter, a weak float32 gives bfloat16, a strong one float32: a learning
rate that was restored as a strong type would change every later number.
"""

import jax
from jax.extend.core.primitives import convert_element_type_p

__all__ = ["weakly_typed"]


def weakly_typed(array: jax.Array) -> jax.Array:
    """Return an array with equal bits and sharding, weakly typed."""
    # Neither `jax.numpy` nor `jax.lax` can make an existing array weak.
    weak: jax.Array = convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )
    # On a mesh with explicit axes the result's spec is written differently.
    return weak if weak.sharding == array.sharding else jax.device_put(weak, array.sharding)
