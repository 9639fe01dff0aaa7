"""Choosing the next token from its logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The most likely token of each row; the first one of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Float[Array, "B V"],
    key: jax.Array,
    *,
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
) -> Int[Array, " B"]:
    """A token of each row, drawn from what `filter_logits` leaves.

    A row's draw depends on the key, the row's number and its own logits, not on how many other
    rows there are.
    """
    wide = logits.astype(jnp.float32)
    # The likeliest token at 0: however small the temperature, nothing overflows.
    wide = (wide - wide.max(axis=-1, keepdims=True)) / temperature
    kept = filter_logits(wide, top_k=top_k, top_p=top_p)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)


def filter_logits(
    logits: Float[Array, "B V"], *, top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Logits with the unlikely tokens at minus infinity.

    Args:
        logits: float32, already divided by the temperature.
        top_k: keep this many tokens; 0 keeps all. Tokens equal to the last one kept stay too.
        top_p: of those, keep the fewest likeliest whose probabilities sum up to this much; 1 keeps
            all. The likeliest token always stays.

    Source: arXiv 1904.09751 (nucleus sampling); order as in transformers.
    """
    vocabulary = logits.shape[-1]
    ordered = jnp.sort(logits, axis=-1, descending=True)
    count = jnp.where(top_k > 0, jnp.minimum(top_k, vocabulary), vocabulary)
    last = jax.lax.dynamic_index_in_dim(ordered, count - 1, axis=-1, keepdims=True)
    ordered = jnp.where(ordered >= last, ordered, -jnp.inf)
    likely = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(likely, axis=-1) - likely
    # Sums round: without `top_p >= 1`, "all" could lose the last few tokens.
    in_nucleus = (before < top_p) | (top_p >= 1) | (jnp.arange(vocabulary) == 0)[None, :]
    kept = in_nucleus & jnp.isfinite(ordered)
    lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)
