"""Multi-head latent attention: keys and values are made of one short vector per token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import Layer
from cairn.interop.config.latent_attention import LatentAttentionConfig
from cairn.state.models.decoder.attention import Angles, Attention
from cairn.state.models.decoder.positions import rotate

__all__ = ["LatentAttention"]


class LatentAttention(Attention):
    """Attention as `LatentAttentionConfig` describes it.

    The cache holds whole keys and values, not the short vectors.

    Source: arXiv 2405.04434 (DeepSeek-V2, section 2.1).
    """

    def __init__(
        self,
        config: DecoderConfig,
        latent: LatentAttentionConfig,
        layers: Mapping[str, Layer],
        **options: Any,
    ) -> None:
        super().__init__(config, layers, **options)
        self.latent = latent

    def project(
        self, x: Float[Array, "B T D"], angles: Angles | None
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K V"]]:
        """Return queries and keys, of which the last dimensions are rotated, and values."""
        latent, rows = self.latent, x.shape[:2]
        if latent.query_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)))
        query = query.reshape(*rows, self.heads, latent.key_dim)
        both = self.kv_a_proj(x)
        short, turning = jnp.split(both, [latent.key_value_rank], axis=-1)
        expanded = self.kv_b_proj(self.kv_a_norm(short)).reshape(*rows, self.heads, -1)
        content, value = jnp.split(expanded, [latent.content_dim], axis=-1)
        turning = turning[:, :, None, :]
        still, turned = jnp.split(query, [latent.content_dim], axis=-1)
        if angles is not None:
            turned, turning = rotate(turned, angles), rotate(turning, angles)
        turning = jnp.broadcast_to(turning, (*rows, self.heads, latent.rotary_dim))
        parts: list[jax.Array] = [
            jnp.concatenate([still, turned], axis=-1),
            jnp.concatenate([content, turning], axis=-1),
        ]
        return parts[0], parts[1], value
