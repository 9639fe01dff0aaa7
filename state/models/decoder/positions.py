"""Rotary positions (RoPE): pairs of a head's dimensions are rotated by the token's position."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cairn.interop.config.frequencies import attention_factor, inverse_frequencies
from cairn.interop.config.rope import RopeConfig


def rotary_angles(
    positions: Int[Array, "B T"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Return the cosines and sines of every token's rotation, in float32.

    With the scalings "dynamic" and "longrope" they also depend on the length of the sequence, which
    is the largest position plus 1.
    """
    frequencies = _frequencies(jnp.max(positions) + 1, rope, head_dim)
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    factor = attention_factor(rope)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)


def rotate(
    x: Float[Array, "B T N H"],
    angles: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
) -> Float[Array, "B T N H"]:
    """Rotate each pair (x[i], x[i + half]) of every head by its token's angle.

    A head's dimensions beyond the first 2 x half stay unchanged. The rotation is computed in
    float32; the result has the dtype of `x`.
    """
    cos, sin = (part[:, :, None, :] for part in angles)
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin]
    rotated = jnp.concatenate([*turned, rest] if rest.shape[-1] else turned, axis=-1)
    return rotated.astype(x.dtype)


def _frequencies(length: jax.Array, rope: RopeConfig, head_dim: int) -> Float[Array, " half"]:
    kept = jnp.asarray(inverse_frequencies(rope, head_dim))
    pretrained_length = rope.original_max_position_embeddings or 1
    if rope.scaling == "longrope":
        beyond = jnp.asarray(inverse_frequencies(rope, head_dim, long=True))
        return jnp.where(length > pretrained_length, beyond, kept)
    if rope.scaling != "dynamic":
        return kept
    dims = rope.rotary_dim(head_dim)
    longer = jnp.maximum(length, pretrained_length).astype(jnp.float32) / pretrained_length
    base = rope.theta * (rope.factor * longer - (rope.factor - 1)) ** (dims / (dims - 2))
    exponents = jnp.arange(0, dims, 2, dtype=jnp.float32) / dims
    return jnp.asarray(1.0 / base**exponents)
