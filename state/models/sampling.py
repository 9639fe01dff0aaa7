"""Choice of the next token: rules change its logits, then it is the likeliest one or drawn.

The rules and their order are those of transformers' logits processors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

NO_TOKEN = -1
"""Value of padding, and of free slots, in a row of tokens."""


class Biases(struct.PyTreeNode):
    """Biases, each on the logit of one token after a certain sequence of tokens.

    All sequences have the same length.

    Attributes:
        after: the sequences, (biases, tokens).
        token: the tokens whose logits change, (biases,).
        bias: the numbers that are added to the logits, (biases,).
    """

    after: jax.Array
    token: jax.Array
    bias: jax.Array

    def added(
        self, logits: Float[Array, "B V"], tokens: Int[Array, "B T"], at: Int[Array, ""]
    ) -> Float[Array, "B V"]:
        """Return the logits plus the biases that apply to each row.

        Args:
            logits: logits of the next token.
            tokens: each row's tokens so far.
            at: slot of the next token.
        """
        tail = _tail(tokens, at, self.after.shape[1])
        matches = (tail[:, None, :] == self.after[None, :, :]).all(axis=-1)
        none = jnp.zeros_like(self.bias)
        biases = jnp.where(matches, self.bias[None, :], none[None, :])
        return logits + jnp.zeros_like(logits).at[:, self.token].add(biases)


class Rules(struct.PyTreeNode):
    """Rules that change logits before a token is chosen; None or an empty value turns a rule off.

    Attributes:
        biases: biases on tokens that would complete certain sequences.
        penalty: for tokens that the row already has, positive logits are divided by this number,
            negative ones multiplied by it.
        ngram: a row has no sequence of this many tokens more than once; 0 for no limit.
        forbidden: biases that are added after the rules above.
        least: number of new tokens before an end token is allowed.
        first: forced first token.
        last: tokens, one of which is forced as the last of a row of maximum length.
        finite: whether to replace NaN by 0, and infinities by the largest finite numbers.
        suppressed: tokens that are never chosen.
        suppressed_first: tokens that are not chosen as the new token number `beginning`.
        beginning: number of a new token, from 0.
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
            logits: the model's logits.
            tokens: each row's tokens so far; `NO_TOKEN` in padding and free slots.
            at: slot of the next token.
            step: number of the new token, from 0.
            limit: maximum number of new tokens.
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
    """Return the `length` tokens before a slot, padded on the left with `NO_TOKEN`."""
    wide = jnp.pad(tokens, ((0, 0), (length, 0)), constant_values=NO_TOKEN)
    return jax.lax.dynamic_slice_in_dim(wide, at, length, axis=1)


def _marked(tokens: Int[Array, "B T"], vocabulary: int) -> Bool[Array, "B V"]:
    """Return a mask of the vocabulary for each row: True for tokens that the row has."""
    columns = jnp.where(tokens < 0, vocabulary, jnp.minimum(tokens, vocabulary))
    rows = jnp.arange(tokens.shape[0])[:, None]
    marked = jnp.zeros((tokens.shape[0], vocabulary + 1), jnp.bool_).at[rows, columns].set(True)
    return marked[:, :vocabulary]


def _repeats(
    tokens: Int[Array, "B T"], at: Int[Array, ""], size: int, vocabulary: int
) -> Bool[Array, "B V"]:
    """Return a mask of tokens that would repeat a sequence of `size` tokens of the row."""
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
    """Return a token for each row, drawn from those that `filter_logits` and `min_p` leave.

    The draw depends on the key, the row's number and its own logits, not on other rows.

    Args:
        logits: logits of the next token.
        key: a JAX key.
        temperature: divisor of the logits, above 0.
        top_k: see `filter_logits`.
        top_p: see `filter_logits`.
        min_p: leave out tokens with less than this fraction of the likeliest token's probability;
            None leaves none out.
    """
    wide = logits.astype(jnp.float32)
    # The largest logit becomes 0, so that a small temperature causes no overflow.
    wide = (wide - wide.max(axis=-1, keepdims=True)) / temperature
    kept = filter_logits(wide, top_k=top_k, top_p=top_p)
    if min_p is not None:
        # The largest logit is 0.
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
    # Rounded sums may exceed 1: without `top_p >= 1`, the last tokens could be lost.
    in_nucleus = (before < top_p) | (top_p >= 1) | (jnp.arange(vocabulary) == 0)[None, :]
    kept = in_nucleus & jnp.isfinite(ordered)
    lowest = jnp.min(jnp.where(kept, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= lowest, logits, -jnp.inf)
