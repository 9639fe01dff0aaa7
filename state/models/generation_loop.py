"""The compiled loop that generates tokens, with a cache or without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from cairn.state.models.sampling import NO_TOKEN, Rules, greedy, sample

Generated = tuple[jax.Array, jax.Array]
"""New tokens (batch, room), and the number of them in each row."""

_SMALLEST_BUCKET = 16
_LARGEST_DOUBLING = 256


class Stop(struct.PyTreeNode):
    """Tokens `eos` that end a row, and the token `pad` that follows its end."""

    eos: jax.Array
    pad: jax.Array

    def now(self, tokens: jax.Array) -> jax.Array:
        """Return a mask of the rows that end with these tokens, one per row."""
        return (tokens[:, None] == self.eos[None, :]).any(axis=1)


class Sampling(struct.PyTreeNode):
    """Settings by which tokens are chosen.

    `random` is static under jit: greedy and sampled generation are separate programs.
    """

    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array
    min_p: jax.Array
    random: bool = struct.field(pytree_node=False)

    def choose(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Return the next token of each row."""
        if not self.random:
            return greedy(logits)
        return sample(
            logits,
            key,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
        )


def bucket(length: int) -> int:
    """Return the length to pad to; nearby lengths get the same, so that they compile once."""
    if length <= _LARGEST_DOUBLING:
        return max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
    return -(-length // _LARGEST_DOUBLING) * _LARGEST_DOUBLING


def with_cache(
    graphdef: Any,
    state: Any,
    prompt: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any],
    *,
    limit: jax.Array,
    **rest: Any,
) -> Generated:
    """Return new tokens, generated with a model that caches keys and values.

    Args:
        graphdef: graphdef of the model.
        state: state of the model.
        prompt: int32 (batch, tokens), padded on the left.
        mask: bool (batch, tokens), False for padding.
        limit: maximum number of tokens to add.
        rest: the arguments `stop`, `rules`, `sampling` and `key` of `_loop`.
    """
    left = bucket(prompt.shape[1]) - prompt.shape[1]
    padding = ((0, 0), (left, 0))
    prompt, mask = np.pad(prompt, padding), np.pad(mask, padding)
    room = bucket(int(limit))
    generated: Generated = cached(graphdef, state, prompt, mask, limit, rest, room=room)
    return generated


def without_cache(
    graphdef: Any,
    state: Any,
    prompt: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any],
    *,
    limit: jax.Array,
    **rest: Any,
) -> Generated:
    """Return new tokens, generated with a model that has no cache and reprocesses all tokens.

    The arguments are those of `with_cache`.
    """
    # Pad on the right: a model without a cache may count positions from the first slot.
    tokens = prompt.shape[1]
    right = ((0, 0), (0, bucket(tokens + int(limit)) - tokens))
    prompt, mask = np.pad(prompt, right), np.pad(mask, right)
    room, start = bucket(int(limit)), jnp.int32(tokens)
    generated: Generated = recomputed(graphdef, state, prompt, mask, start, limit, rest, room=room)
    return generated


@functools.partial(jax.jit, static_argnames=("graphdef", "room"))
def cached(
    graphdef: Any,
    state: Any,
    prompt: jax.Array,
    mask: jax.Array,
    limit: jax.Array,
    rest: dict[str, Any],
    *,
    room: int,
) -> Generated:
    """Run the compiled part of `with_cache`; `room` is the bucket of `limit`."""
    model = _evaluated(graphdef, state)
    inputs = model.prepare_inputs_for_generation(prompt, prompt.shape[1] + room, mask)
    outputs = model(**inputs)

    def logits_after(tokens: jax.Array, step: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        inputs_now = model.update_inputs_for_generation(
            outputs.replace(cache=cache), tokens, inputs
        )
        step_outputs = _evaluated(graphdef, state)(**inputs_now)
        return step_outputs.logits[:, -1], step_outputs.cache

    so_far = jnp.pad(_tokens(prompt, mask), ((0, 0), (0, room)), constant_values=NO_TOKEN)
    start = jnp.int32(prompt.shape[1])
    return _loop(
        outputs.logits[:, -1],
        outputs.cache,
        logits_after,
        limit,
        so_far=so_far,
        start=start,
        room=room,
        **rest,
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "room"))
def recomputed(
    graphdef: Any,
    state: Any,
    prompt: jax.Array,
    mask: jax.Array,
    start: jax.Array,
    limit: jax.Array,
    rest: dict[str, Any],
    *,
    room: int,
) -> Generated:
    """Run the compiled part of `without_cache`; the first new token goes to slot `start`."""

    def forward(ids: jax.Array, mask: jax.Array, at: jax.Array) -> jax.Array:
        model = _evaluated(graphdef, state)
        outputs = model(input_ids=ids, attention_mask=mask.astype(jnp.int32))
        logits = (
            outputs["logits"] if isinstance(outputs, dict) else getattr(outputs, "logits", outputs)
        )
        taken: jax.Array = jax.lax.dynamic_index_in_dim(logits, at, axis=1, keepdims=False)
        return taken

    def logits_after(
        tokens: jax.Array, step: jax.Array, carry: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        at = start + step
        ids = jax.lax.dynamic_update_slice(carry[0], tokens[:, None], (jnp.int32(0), at))
        seen = jax.lax.dynamic_update_slice(
            carry[1], jnp.ones_like(carry[1][:, :1]), (jnp.int32(0), at)
        )
        return forward(ids, seen, at), (ids, seen)

    first = forward(prompt, mask, start - 1)
    return _loop(
        first,
        (prompt, mask),
        logits_after,
        limit,
        so_far=_tokens(prompt, mask),
        start=start,
        room=room,
        **rest,
    )


def _tokens(prompt: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, prompt, NO_TOKEN)


def _evaluated(graphdef: Any, state: Any) -> Any:
    """Return a new module in evaluation mode.

    Each trace needs its own, since a forward pass may change the module's variables.
    """
    model = nnx.merge(graphdef, state, copy=True)
    model.eval()
    return model


def _loop(
    logits: jax.Array,
    carry: Any,
    logits_after: Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
    limit: jax.Array,
    *,
    so_far: jax.Array,
    start: jax.Array,
    room: int,
    stop: Stop,
    rules: Rules | None,
    sampling: Sampling,
    key: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the new tokens (batch, room), padded, and the number of them in each row.

    Args:
        logits: logits of the first new token.
        carry: state that `logits_after` passes from call to call.
        logits_after: function from the chosen tokens, the step's number and the carry to the next
            logits and carry.
        limit: maximum number of tokens to add.
        so_far: tokens of each row, with slots for the new ones; `NO_TOKEN` in free slots and for
            padding.
        start: slot of the first new token.
        room: the bucket of `limit`.
        stop: end tokens and padding token.
        rules: rules that change logits; None for no rules.
        sampling: settings by which tokens are chosen.
        key: a JAX key.
    """
    batch = logits.shape[0]
    new_tokens = jnp.full((batch, room), stop.pad, jnp.int32)
    lengths, done = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), jnp.bool_)
    seen = None if rules is None else so_far

    def goes_on(loop: tuple[Any, ...]) -> jax.Array:
        more: jax.Array = (loop[0] < limit) & ~loop[1].all()
        return more

    def advance(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        step, done, lengths, new_tokens, seen, logits, carry = loop
        at = start + step
        ruled = logits
        if rules is not None:
            ruled = rules.applied(logits, seen, at, step=step, limit=limit, eos=stop.eos)
        chosen = sampling.choose(ruled, jax.random.fold_in(key, step))
        tokens = jnp.where(done, stop.pad, chosen)
        new_tokens = jax.lax.dynamic_update_slice(new_tokens, tokens[:, None], (jnp.int32(0), step))
        if rules is not None:
            seen = jax.lax.dynamic_update_slice(seen, tokens[:, None], (jnp.int32(0), at))
        lengths = lengths + (~done).astype(jnp.int32)
        done = done | stop.now(tokens)
        # No forward pass after the last token: its logits are not needed.
        last = (step + 1 >= limit) | done.all()
        logits, carry = jax.lax.cond(
            last,
            lambda carry: (logits, carry),
            lambda carry: logits_after(tokens, step, carry),
            carry,
        )
        return step + 1, done, lengths, new_tokens, seen, logits, carry

    loop = (jnp.int32(0), done, lengths, new_tokens, seen, logits, carry)
    _, _, lengths, new_tokens, *_ = jax.lax.while_loop(goes_on, advance, loop)
    return new_tokens, lengths
