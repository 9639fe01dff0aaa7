"""Outputs of a language model's forward pass."""

from typing import Any

import jax
from flax import struct

__all__ = ["CausalLMOutput"]


class CausalLMOutput(struct.PyTreeNode, eq=False):  # type: ignore[call-arg]  # flax is untyped
    """Logits of a causal language model, and its loss if labels were given.

    Attributes:
        logits: logits (batch, tokens, vocabulary).
        loss: the loss, a scalar; None without labels.
        cache: what the model keeps between decoding steps, such as keys and values; or None.
        metrics: parts of the loss, by name; None without labels.
        auxiliary_loss: a scalar of the model, such as its router's loss, which the loss adds with a
            weight; or None.
    """

    logits: jax.Array
    loss: jax.Array | None = None
    cache: Any = None
    metrics: dict[str, jax.Array] | None = None
    auxiliary_loss: jax.Array | None = None
