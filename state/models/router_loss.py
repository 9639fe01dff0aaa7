"""Auxiliary loss of a mixture of experts, which is low if the router spreads tokens evenly."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from cairn.interop.errors import ArgumentError

__all__ = ["load_balancing_loss"]


def load_balancing_loss(
    router_logits: Sequence[jax.Array] | jax.Array,
    num_experts: int,
    top_k: int = 2,
    attention_mask: jax.Array | None = None,
) -> jax.Array:
    """Return the load balancing loss `E sum_e f_e P_e`.

    It is `top_k` if tokens and probabilities are spread evenly over experts, and as a rule larger
    otherwise. f_e is the fraction of tokens that use expert e; P_e is the mean of the router's
    probability of e. Both are over the tokens of all layers. Gradients flow through P only. Sums
    are computed in float32; if every token is padding, the loss is 0.

    Pass it to `compute_loss(auxiliary_loss=...)`, or return it in
    `CausalLMOutput(auxiliary_loss=...)`; `LossConfig.auxiliary_loss_coefficient` weighs it.

    Args:
        router_logits: (layers, batch, tokens, experts), or a sequence of layers; a layer may be
            flat, (batch x tokens, experts).
        num_experts: E, the last axis of the logits.
        top_k: number of experts that each token uses.
        attention_mask: (batch, tokens), 1 for tokens, 0 for padding, which does not count.

    Returns:
        A float32 scalar.

    Raises:
        ArgumentError: shapes do not fit together, or `top_k` is not from 1 to `num_experts`.

    Source: Switch Transformer (arXiv 2101.03961, equations 4 to 6), for several experts per token
        as in transformers `load_balancing_loss_func`.
    """
    layers = [jnp.asarray(layer) for layer in router_logits]
    shapes = [layer.shape for layer in layers]
    rows = [layer.size // max(num_experts, 1) for layer in layers]
    if not layers or any(len(s) < 2 or s[-1] != num_experts for s in shapes) or len({*rows}) > 1:
        raise ArgumentError(
            path="router_logits",
            expected=f"layers of shape (batch, tokens, {num_experts}), all of one size",
            found=f"{len(layers)} layers of shapes {sorted(set(shapes))}",
        )
    if not 1 <= top_k <= num_experts:
        raise ArgumentError(path="top_k", expected=f"from 1 to {num_experts}", found=top_k)
    if attention_mask is not None and attention_mask.size != rows[0]:
        raise ArgumentError(
            path="attention_mask",
            expected=f"one number for each of {rows[0]} tokens",
            found=f"shape {attention_mask.shape}",
        )
    logits = jnp.stack([layer.reshape(rows[0], num_experts) for layer in layers])
    logits = logits.astype(jnp.float32)
    weights = jnp.ones((rows[0],), jnp.float32)
    if attention_mask is not None:
        weights = attention_mask.reshape(-1).astype(jnp.float32)
    probabilities = jax.nn.softmax(logits, axis=-1)
    _, chosen = jax.lax.top_k(probabilities, top_k)
    hits = jax.nn.one_hot(chosen, num_experts, dtype=jnp.float32).sum(axis=2)
    counted = jnp.maximum(weights.sum() * len(layers), 1.0)
    shares = jnp.einsum("LTE,T->E", hits, weights) / counted
    means = jnp.einsum("LTE,T->E", probabilities, weights) / counted
    return num_experts * jnp.dot(shares, means)
