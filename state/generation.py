"""EasyGenerationMixin: greedy and sampled text generation, compiled once per shape bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from state.errors import ArgumentError
from state.generation_loop import Sampling, Stop, with_cache, without_cache

if TYPE_CHECKING:
    from state.config import EDPretrainedConfig
    from state.decoder.cache import KVCache


class GenerationOutput(struct.PyTreeNode):
    """What `generate` returns.

    Attributes:
        sequences: int32 (batch, tokens): each prompt as it was given, then the new tokens, then
            padding. Ends with the longest row.
        lengths: int32 (batch,): how many tokens each row got, the end-of-sequence token included.
    """

    sequences: jax.Array
    lengths: jax.Array


class EasyGenerationMixin:
    """Generation for any causal language model; fast for those that take a `cache`."""

    if TYPE_CHECKING:
        config: EDPretrainedConfig
        takes_cache: bool
        init_operations_cache: Callable[..., KVCache]

    def can_generate(self) -> bool:
        """Whether the forward pass takes what `generate` passes: `input_ids`, `attention_mask`."""
        parameters = inspect.signature(type(self).__call__).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return "input_ids" in parameters and ("attention_mask" in parameters or takes_any)

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        max_new_tokens: int = 20,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        rng: Any = None,
    ) -> GenerationOutput:
        """Continues each prompt.

        Without sampling arguments the likeliest token is taken each time. Prompts are padded to a
        few lengths ("buckets") inside, so that nearby lengths share one compilation.

        Args:
            input_ids: integers (batch, tokens).
            attention_mask: 1 for tokens, 0 for padding, which must be on the left.
            max_new_tokens: most tokens to add.
            do_sample: draw tokens at random; by default if `temperature` is above 0, or `top_p`
                or `top_k` is given.
            temperature: divides the logits, 1 by default; 0 takes the likeliest token.
            top_p: draw from the likeliest tokens whose probabilities sum up to this.
            top_k: draw from this many likeliest tokens.
            eos_token_id: stop a row at one of these; by default the config's, () for none.
            pad_token_id: what follows a row's end; by default the config's, else its first
                end-of-sequence token, else 0.
            rng: a JAX key, a seed or `nnx.Rngs`; seed 0 by default.

        Raises:
            ArgumentError: an argument out of range, padding elsewhere than on the left, or a
                model whose forward pass can't be used.
        """
        prompt, mask = self._checked_prompt(input_ids, attention_mask)
        sampling = _sampling(do_sample, temperature, top_p, top_k)
        if max_new_tokens < 1:
            raise ArgumentError(path="max_new_tokens", expected="1 or more", found=max_new_tokens)
        eos = _end_tokens(self.config, eos_token_id)
        if pad_token_id is None:
            pad_token_id = _config_value(self.config, "pad_token_id")
        pad = pad_token_id if pad_token_id is not None else next(iter(eos), 0)
        graphdef, state = nnx.split(self)
        run = with_cache if self.takes_cache else without_cache
        tokens, lengths = run(
            graphdef,
            state,
            prompt,
            mask,
            limit=jnp.int32(max_new_tokens),
            stop=Stop(jnp.asarray(eos, jnp.int32), jnp.int32(pad)),
            sampling=sampling,
            key=_key(rng),
        )
        longest = int(lengths.max())
        sequences = jnp.concatenate([jnp.asarray(prompt), tokens[:, :longest]], axis=1)
        return GenerationOutput(sequences=sequences, lengths=lengths)

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """The forward pass's arguments for the prompt, with an empty cache of `max_length` slots.

        Args:
            input_ids: integers (batch, tokens), padded on the left.
            max_length: slots of the cache: prompt and new tokens together.
            attention_mask: 1 for tokens, 0 for padding.
        """
        starts = None
        if attention_mask is not None:
            starts = jnp.argmax(attention_mask.astype(jnp.bool_), axis=1).astype(jnp.int32)
        cache = self.init_operations_cache(input_ids.shape[0], max_length, starts)
        return {"input_ids": input_ids, "cache": cache}

    def update_inputs_for_generation(
        self, outputs: Any, next_tokens: jax.Array, inputs: dict[str, Any]
    ) -> dict[str, Any]:
        """The forward pass's arguments for the next token of each row.

        Args:
            outputs: of the last forward pass.
            next_tokens: integers (batch,).
            inputs: of the last forward pass.
        """
        return {**inputs, "input_ids": next_tokens[:, None], "cache": outputs.cache}

    def _checked_prompt(
        self, input_ids: Any, attention_mask: Any
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        if not self.can_generate():
            raise ArgumentError(
                path=f"{type(self).__name__}.generate",
                expected="a forward pass that takes input_ids and attention_mask",
                found=str(inspect.signature(type(self).__call__)),
            )
        prompt = np.asarray(input_ids)
        if prompt.ndim != 2 or 0 in prompt.shape or not np.issubdtype(prompt.dtype, np.integer):
            raise ArgumentError(
                path="input_ids",
                expected="integers of shape (batch, tokens), neither of them 0",
                found=f"{prompt.dtype} of shape {prompt.shape}",
            )
        mask = np.ones(prompt.shape, bool)
        if attention_mask is not None:
            mask = np.asarray(attention_mask).astype(bool)
        if mask.shape != prompt.shape:
            raise ArgumentError(
                path="attention_mask", expected=f"shape {prompt.shape}", found=f"{mask.shape}"
            )
        if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
            raise ArgumentError(
                path="attention_mask",
                expected="padding on the left only: zeros, then ones up to the end of each row",
                found=f"other rows: {np.flatnonzero(~_left_padded(mask)).tolist()}",
                next_step="set the tokenizer's padding_side to 'left'",
            )
        return prompt.astype(np.int32), mask


def _left_padded(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rows: np.ndarray[Any, Any] = mask[:, -1] & ~(mask[:, :-1] & ~mask[:, 1:]).any(axis=1)
    return rows


def _sampling(
    do_sample: bool | None, temperature: float | None, top_p: float | None, top_k: int | None
) -> Sampling:
    if temperature is not None and not temperature >= 0:
        raise ArgumentError(path="temperature", expected="0 or more", found=temperature)
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentError(path="top_p", expected="above 0, and at most 1", found=top_p)
    if top_k is not None and top_k < 0:
        raise ArgumentError(path="top_k", expected="0 (all tokens) or more", found=top_k)
    asked = any(value is not None for value in (temperature, top_p, top_k))
    random = (asked if do_sample is None else do_sample) and temperature != 0
    return Sampling(
        temperature=jnp.float32(temperature or 1.0),
        top_p=jnp.float32(1.0 if top_p is None else top_p),
        top_k=jnp.int32(0 if top_k is None else top_k),
        random=bool(random),
    )


def _end_tokens(config: Any, given: int | Sequence[int] | None) -> tuple[int, ...]:
    value = _config_value(config, "eos_token_id") if given is None else given
    if value is None:
        return ()
    return (int(value),) if isinstance(value, int) else tuple(int(token) for token in value)


def _config_value(config: Any, name: str) -> Any:
    extra = getattr(config, "hf_extra", {})
    return getattr(config, name, extra.get(name))


def _key(rng: Any) -> jax.Array:
    if rng is None or isinstance(rng, int):
        return jax.random.key(rng or 0)
    if isinstance(rng, nnx.Rngs):
        drawn: jax.Array = rng()
        return drawn
    key: jax.Array = rng
    return key
