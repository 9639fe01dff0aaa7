"""Causal self-attention with grouped heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import Layer
from cairn.state.models.decoder.attention_placement import place_keys, place_queries
from cairn.state.models.decoder.layers import make_layer
from cairn.state.models.decoder.positions import rotate
from cairn.state.models.kv_cache import KVCache

Angles = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]


class Attention(nnx.Module):
    """Multi-head attention whose query heads share key and value heads in equal groups.

    Source: arXiv 2305.13245 (grouped-query attention), arXiv 2104.09864 (rotary positions).
    """

    def __init__(self, config: DecoderConfig, layers: Mapping[str, Layer], **options: Any) -> None:
        self.heads = config.num_attention_heads
        self.kv_heads = config.kv_heads
        self.precision = options["precision"]
        self.partition_axis = config.partition_axis
        self.sharded = config.shard_attention_computation
        self.scale = config.attention_scale or 1.0 / math.sqrt(config.head_size)
        self.soft_cap = config.attention_soft_cap
        self.qk_norm = config.qk_norm
        for name, spec in layers.items():
            setattr(self, name, make_layer(spec, config, **options))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: Angles | None,
        mask: Bool[Array, "B T S"],
        cache: KVCache | None,
        layer: int | jax.Array,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """Return the layer's contribution to the residual stream, and the cache with new tokens."""
        query, key, value = self.project(x, angles)
        if cache is not None:
            cache, key, value = cache.write(layer, key, value)
            key, value = key.astype(query.dtype), value.astype(query.dtype)
        axis, sharded = self.partition_axis, self.sharded
        query = place_queries(query, axis, sharded)
        key, value = place_keys(key, axis, sharded), place_keys(value, axis, sharded)
        attended = grouped_attention(
            query,
            key,
            value,
            mask,
            scale=self.scale,
            soft_cap=self.soft_cap,
            sinks=self.sinks[...] if hasattr(self, "sinks") else None,
            precision=self.precision,
        )
        attended = place_queries(attended, axis, sharded)
        out: jax.Array = self.o_proj(attended.reshape(*x.shape[:2], -1))
        return out, cache

    def project(
        self, x: Float[Array, "B T D"], angles: Angles | None
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K V"]]:
        """Return queries and keys, rotated by the angles if there are any, and values."""
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if self.qk_norm == "whole":
            query, key = self.q_norm(query), self.k_norm(key)
        query = query.reshape(*x.shape[:2], self.heads, -1)
        key, value = (
            projected.reshape(*x.shape[:2], self.kv_heads, -1) for projected in (key, value)
        )
        if self.qk_norm in ("head", "each_head"):
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = rotate(query, angles), rotate(key, angles)
        return query, key, value


def grouped_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    mask: Bool[Array, "B T S"],
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    precision: Any = None,
) -> Float[Array, "B T N V"]:
    """Return `softmax(scale query key^T) value` over the slots that `mask` allows.

    Query head n attends with key/value head n // (N / K). The softmax is computed in float32. A
    token that may attend to nothing (padding) gets the mean of all values, not NaN.

    Args:
        query: queries.
        key: keys.
        value: values.
        mask: True for the slots that each token may attend to.
        scale: factor on the scores; None for 1 / sqrt(H).
        soft_cap: bound on the scores, applied as `cap tanh(score / cap)` (arXiv 2408.00118); None
            for no bound.
        sinks: one extra logit per head in the softmax, without a value (arXiv 2309.17453); None for
            no sinks.
        precision: precision of matrix multiplications; None for JAX's default.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, precision=precision)
    scores = scores.astype(jnp.float32) * (1.0 / math.sqrt(head_dim) if scale is None else scale)
    if soft_cap is not None:
        scores = jnp.tanh(scores / soft_cap) * soft_cap
    scores = jnp.where(mask[:, None, None, :, :], scores, jnp.finfo(jnp.float32).min)
    if sinks is not None:
        own = sinks.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1, 1)
        own = jnp.broadcast_to(own, (*scores.shape[:-1], 1))
        scores = jnp.concatenate([scores, own], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]].astype(value.dtype)
    attended = jnp.einsum("BKGTS,BSKV->BTKGV", weights, value, precision=precision)
    return attended.reshape(batch, tokens, heads, value.shape[-1])
