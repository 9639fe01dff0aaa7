"""Outputs of a language model's forward pass."""

from typing import Any

import jax
from flax import struct

__all__ = ["CausalLMOutput"]


class CausalLMOutput(struct.PyTreeNode, eq=False):  # type: ignore[call-arg]  # flax is untyped
    """Logits of a causal language model, and its loss if labels were given.

    `logits` has the shape (batch, tokens, vocabulary); `loss` is a scalar or None; `cache` is
    whatever the model keeps between decoding steps; `metrics` holds the parts of the loss;
    `auxiliary_loss` is a scalar of the model's own, such as a router's, for the loss to weigh.
    """

    logits: jax.Array
    loss: jax.Array | None = None
    cache: Any = None
    metrics: dict[str, jax.Array] | None = None
    auxiliary_loss: jax.Array | None = None
