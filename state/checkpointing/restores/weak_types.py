"""Weakly typed arrays, which JAX makes of Python numbers. Imports JAX.

A weak float32 times a bfloat16 parameter gives bfloat16, a strong float32 gives float32. So a
learning rate that is saved weak and restored strong would change all later results.
"""

import jax
from jax.extend.core.primitives import convert_element_type_p

__all__ = ["weakly_typed"]


def weakly_typed(array: jax.Array) -> jax.Array:
    """Return a weakly typed array with the same bits and sharding."""
    # Neither `jax.numpy` nor `jax.lax` can make an existing array weak.
    weak: jax.Array = convert_element_type_p.bind(
        array, new_dtype=array.dtype, weak_type=True, sharding=None
    )
    # On a mesh with explicit axes the result's spec is equivalent, but not equal.
    return weak if weak.sharding == array.sharding else jax.device_put(weak, array.sharding)
