"""Causal self-attention with grouped heads."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from cairn.state.config import DecoderConfig
from cairn.state.decoder.attention_placement import place_keys, place_queries
from cairn.state.decoder.linear import linear
from cairn.state.decoder.positions import rotate
from cairn.state.module import KVCache
from cairn.state.placement import DECODER_AXES

Angles = tuple[Float[Array, "B T half"], Float[Array, "B T half"]]


class Attention(nnx.Module):
    """Multi-head attention whose query heads share key and value heads in equal groups.

    Source: arXiv 2305.13245 (grouped-query attention), arXiv 2104.09864 (rotary positions).
    """

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        self.heads = config.num_attention_heads
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_size
        self.precision = options["precision"]
        self.partition_axis = config.partition_axis
        self.sharded = config.shard_attention_computation
        model, queries = config.hidden_size, self.heads * self.head_dim
        shared = self.kv_heads * self.head_dim
        options["use_bias"] = config.attention_bias
        self.q_proj = linear(config, model, queries, axes=DECODER_AXES["q_proj"], **options)
        self.k_proj = linear(config, model, shared, axes=DECODER_AXES["k_proj"], **options)
        self.v_proj = linear(config, model, shared, axes=DECODER_AXES["v_proj"], **options)
        options["use_bias"] = config.attention_out_bias
        self.o_proj = linear(config, queries, model, axes=DECODER_AXES["o_proj"], **options)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        angles: Angles,
        mask: Bool[Array, "B T S"],
        cache: KVCache | None,
        layer: int | jax.Array,
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        """The layer's contribution to the residual stream, and the cache with its new tokens."""
        batch, tokens, _ = x.shape
        query = self.q_proj(x).reshape(batch, tokens, self.heads, self.head_dim)
        key = self.k_proj(x).reshape(batch, tokens, self.kv_heads, self.head_dim)
        value = self.v_proj(x).reshape(batch, tokens, self.kv_heads, self.head_dim)
        query, key = rotate(query, angles), rotate(key, angles)
        if cache is not None:
            cache, key, value = cache.write(layer, key, value)
            key, value = key.astype(query.dtype), value.astype(query.dtype)
        axis, sharded = self.partition_axis, self.sharded
        query = place_queries(query, axis, sharded)
        key, value = place_keys(key, axis, sharded), place_keys(value, axis, sharded)
        attended = grouped_attention(query, key, value, mask, precision=self.precision)
        attended = place_queries(attended, axis, sharded)
        out: jax.Array = self.o_proj(attended.reshape(batch, tokens, self.heads * self.head_dim))
        return out, cache


def grouped_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    mask: Bool[Array, "B T S"],
    *,
    precision: Any = None,
) -> Float[Array, "B T N H"]:
    """`softmax(query key^T / sqrt(H)) value` over the slots that `mask` allows.

    Query head n attends with key/value head n // (N / K); G below counts the query heads of one
    group. The softmax runs in float32. A token that may attend to nothing (padding) gets the mean
    of all values, never NaN.
    """
    batch, tokens, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    grouped = query.reshape(batch, tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key, precision=precision)
    scores = scores.astype(jnp.float32) * (1.0 / math.sqrt(head_dim))
    scores = jnp.where(mask[:, None, None, :, :], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    attended = jnp.einsum("BKGTS,BSKH->BTKGH", weights, value, precision=precision)
    return attended.reshape(batch, tokens, heads, head_dim)
