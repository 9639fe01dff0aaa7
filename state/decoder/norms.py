"""Normalisation layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Root mean square normalisation: `x / sqrt(mean(x^2) + eps) * scale`, per token.

    The mean runs in float32 whatever the input's dtype; the product with `scale` runs in the
    input's dtype, as transformers does it.

    Source: arXiv 1910.07467.
    """

    def __init__(self, features: int, *, eps: float, param_dtype: Any) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,), param_dtype), axes=("norm",))

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The normalised tokens, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(variance + self.eps)).astype(x.dtype)
        scale = self.scale[...].astype(x.dtype)
        return normed * jnp.broadcast_to(scale, x.shape)
