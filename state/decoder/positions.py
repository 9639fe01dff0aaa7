"""Rotary positions (RoPE): each pair of a head's dimensions turns with its token's position."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from cairn.state.config import RopeConfig, inverse_frequencies


def rotary_angles(
    positions: Int[Array, "B T"], rope: RopeConfig, head_dim: int
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosines and sines of every token's rotation, in float32."""
    frequencies = jnp.asarray(inverse_frequencies(rope, head_dim))
    angles = positions.astype(jnp.float32)[..., None] * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T N H"],
    angles: tuple[Float[Array, "B T half"], Float[Array, "B T half"]],
) -> Float[Array, "B T N H"]:
    """Rotates each pair (x[i], x[i + H/2]) of every head by its token's angle.

    Runs in float32 and comes back in the dtype of `x`.
    """
    cos, sin = (part[:, :, None, :] for part in angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
