"""Room for Optax under strict numerics.

Optax raises a float to an int32 step counter and broadcasts scalars, which JAX refuses under
`jax_numpy_dtype_promotion="strict"`. A run with strict numerics keeps them for its own code: only
the calls into Optax are traced with JAX's usual promotion. The values are the same either way.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import jax

__all__ = ["optax_numerics"]


@contextmanager
def optax_numerics() -> Iterator[None]:
    """Traces what is inside with JAX's usual promotion of dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
