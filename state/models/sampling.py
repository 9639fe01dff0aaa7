"""Choice of the next token: rules that change its logits, then the likeliest token, or a draw.

The rules and their order are those of transformers' logits processors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

NO_TOKEN = -1
"""Marker of padding, and of slots that are still free, in a row of tokens."""


class Biases(struct.PyTreeNode):
    """Biases on the logit of a token that follows certain tokens; all sequences have one length.

    Attributes:
        after: the tokens before it, (biases, tokens).
        token: the token, (biases,).
        bias: the number added to its logit, (biases,).
    """

    after: jax.Array
    token: jax.Array
    bias: jax.Array

    def added(
        self, logits: Float[Array, "B V"], tokens: Int[Array, "B T"], at: Int[Array, ""]
    ) -> Float[Array, "B V"]:
        """Return the logits, with the biases that apply to each row."""
        tail = _tail(tokens, at, self.after.shape[1])
        matches = (tail[:, None, :] == self.after[None, :, :]).all(axis=-1)
        none = jnp.zeros_like(self.bias)
        biases = jnp.where(matches, self.bias[None, :], none[None, :])
        return logits + jnp.zeros_like(logits).at[:, self.token].add(biases)


class Rules(struct.PyTreeNode):
    """Rules that change logits before a token is chosen; None or an empty value turns a rule off.

    Attributes:
        biases: added to logits of tokens that would complete a sequence.
        penalty: divides the logits of tokens that the row has, and multiplies negative ones.
        ngram: no sequence of this many tokens comes twice in a row; 0 for no limit.
        forbidden: biases that are added after the rules above.
        least: new tokens before an end token may come.
        first: forced first token.
        last: forced tokens, one of which a row of full length ends with.
        finite: NaN becomes 0, and infinities the largest numbers.
        suppressed: tokens that are never chosen.
        suppressed_first: tokens that are not chosen as new token number `beginning`.
        beginning: from 0.
    """

    biases: tuple[Biases, ...] = ()
    penalty: jax.Array | None = None
    ngram: int = struct.field(pytree_node=False, default=0)
    forbidden: tuple[Biases, ...] = ()
    least: jax.Array | None = None
    first: jax.Array | None = None
    last: jax.Array | None = None
    finite: bool = struct.field(pytree_node=False, default=False)
    suppressed: jax.Array | None = None
    suppressed_first: jax.Array | None = None
    beginning: jax.Array | None = None

    def applied(
        self,
        logits: Float[Array, "B V"],
        tokens: Int[Array, "B T"],
        at: Int[Array, ""],
        *,
        step: Int[Array, ""],
        limit: Int[Array, ""],
        eos: Int[Array, " E"],
    ) -> Float[Array, "B V"]:
        """Return the logits of the next token, float32.

        Args:
            logits: as the model gives them.
            tokens: each row so far, `NO_TOKEN` elsewhere.
            at: the slot of the next token.
            step: number of the new token, from 0.
            limit: most new tokens.
            eos: end tokens.
        """
        logits = logits.astype(jnp.float32)
        for biases in self.biases:
            logits = biases.added(logits, tokens, at)
        if self.penalty is not None:
            penalized = jnp.where(logits < 0, logits * self.penalty, logits / self.penalty)
            logits = jnp.where(_marked(tokens, logits.shape[-1]), penalized, logits)
        if self.ngram:
            repeats = _repeats(tokens, at, self.ngram, logits.shape[-1])
            logits = jnp.where(repeats, -jnp.inf, logits)
        for biases in self.forbidden:
            logits = biases.added(logits, tokens, at)
        if self.least is not None:
            logits = _without(logits, eos, when=step < self.least)
        if self.first is not None:
            logits = _only(logits, self.first, when=step == 0)
        if self.last is not None:
            logits = _only(logits, self.last, when=step == limit - 1)
        if self.finite:
            logits = jnp.nan_to_num(logits)
        if self.suppressed is not None:
            logits = _without(logits, self.suppressed, when=jnp.bool_(True))
        if self.suppressed_first is not None and self.beginning is not None:
            logits = _without(logits, self.suppressed_first, when=step == self.beginning)
        return logits


def _tail(tokens: Int[Array, "B T"], at: Int[Array, ""], length: int) -> Int[Array, "B L"]:
    """Return the last tokens before a slot; `NO_TOKEN` where a row has fewer."""
    wide = jnp.pad(tokens, ((0, 0), (length, 0)), constant_values=NO_TOKEN)
    return jax.lax.dynamic_slice_in_dim(wide, at, length, axis=1)


def _marked(tokens: Int[Array, "B T"], vocabulary: int) -> Bool[Array, "B V"]:
    """Return which tokens of the vocabulary are in each row; `NO_TOKEN` is in none."""
    columns = jnp.where(tokens < 0, vocabulary, jnp.minimum(tokens, vocabulary))
    rows = jnp.arange(tokens.shape[0])[:, None]
    marked = jnp.zeros((tokens.shape[0], vocabulary + 1), jnp.bool_).at[rows, columns].set(True)
    return marked[:, :vocabulary]


def _repeats(
    tokens: Int[Array, "B T"], at: Int[Array, ""], size: int, vocabulary: int
) -> Bool[Array, "B V"]:
    """Return which tokens would complete a sequence of `size` tokens that the row already has."""
    windows = tokens.shape[1] - size + 1
    if windows < 1:
        return jnp.zeros((tokens.shape[0], vocabulary), jnp.bool_)
    tail = _tail(tokens, at, size - 1)
    matches = jnp.broadcast_to((tail >= 0).all(axis=1)[:, None], (tokens.shape[0], windows))
    for place in range(size - 1):
        matches = matches & (tokens[:, place : place + windows] == tail[:, place, None])
    ends = jnp.where(matches, tokens[:, size - 1 :], NO_TOKEN)
    return _marked(ends, vocabulary)


def _is_one_of(vocabulary: int, tokens: Int[Array, " N"]) -> Bool[Array, "1 V"]:
    return (jnp.arange(vocabulary)[:, None] == tokens[None, :]).any(axis=1)[None, :]


def _without(
    logits: Float[Array, "B V"], tokens: Int[Array, " N"], *, when: Bool[Array, ""]
) -> Float[Array, "B V"]:
    return jnp.where(_is_one_of(logits.shape[-1], tokens) & when, -jnp.inf, logits)


def _only(
    logits: Float[Array, "B V"], tokens: Int[Array, " N"], *, when: Bool[Array, ""]
) -> Float[Array, "B V"]:
    forced = jnp.where(_is_one_of(logits.shape[-1], tokens), jnp.float32(0), -jnp.inf)
    return jnp.where(when, forced, logits)


def greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Return the most likely token of each row; the first one of equals."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(
    logits: Float[Array, "B V"],
    key: jax.Array,
    *,
    temperature: Float[Array, ""],
    top_k: Int[Array, ""],
    top_p: Float[Array, ""],
    min_p: Float[Array, ""] | None = None,
) -> Int[Array, " B"]:
    """Draw a token for each row from what `filter_logits` leaves.

    A row's draw depends on the key, the row's number and its own logits, not on how many other
    rows there are.
    """
    wide = logits.astype(jnp.float32)
    # The likeliest token at 0: however small the temperature, nothing overflows.
    wide = (wide - wide.max(axis=-1, keepdims=True)) / temperature
    kept = filter_logits(wide, top_k=top_k, top_p=top_p)
    if min_p is not None:
        # The likeliest token is at 0.
        kept = jnp.where(wide >= jnp.log(min_p), kept, -jnp.inf)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(logits.shape[0]))
    return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)


def filter_logits(
    logits: Float[Array, "B V"], *, top_k: Int[Array, ""], top_p: Float[Array, ""]
) -> Float[Array, "B V"]:
    """Return logits with the unlikely tokens at minus infinity.

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
