"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Root mean square normalisation: `x / sqrt(mean(x^2) + eps) * scale`, over the last axis.

    The mean is computed in float32; the multiplication by `scale` in the input's dtype, as in
    transformers. With `offset`, the factor is `1 + scale`, and all is computed in float32.

    Source: arXiv 1910.07467.
    """

    def __init__(
        self,
        shape: Sequence[int] | int,
        *,
        eps: float,
        param_dtype: Any,
        axes: tuple[str | None, ...] = ("norm",),
        offset: bool = False,
    ) -> None:
        self.eps = eps
        self.offset = offset
        start = jnp.zeros if offset else jnp.ones
        self.scale = nnx.Param(start(shape, param_dtype), axes=axes)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Return the normalised tokens, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = wide * jax.lax.rsqrt(variance + self.eps)
        if self.offset:
            scale = self.scale[...].astype(jnp.float32)
            return (normed * (1.0 + jnp.broadcast_to(scale, x.shape))).astype(x.dtype)
        scale = self.scale[...].astype(x.dtype)
        return normed.astype(x.dtype) * jnp.broadcast_to(scale, x.shape)


class LayerNorm(nnx.Module):
    """`(x - mean(x)) / sqrt(var(x) + eps) * scale + bias`, over the last axis, in float32.

    Source: arXiv 1607.06450.
    """

    def __init__(
        self,
        shape: Sequence[int] | int,
        *,
        eps: float,
        param_dtype: Any,
        axes: tuple[str | None, ...] = ("norm",),
        use_bias: bool = True,
    ) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(shape, param_dtype), axes=axes)
        if use_bias:
            self.bias = nnx.Param(jnp.zeros(shape, param_dtype), axes=axes)

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """Return the normalised tokens, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.eps)
        normed = normed * jnp.broadcast_to(self.scale[...].astype(jnp.float32), x.shape)
        if hasattr(self, "bias"):
            normed = normed + jnp.broadcast_to(self.bias[...].astype(jnp.float32), x.shape)
        return normed.astype(x.dtype)
