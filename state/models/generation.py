"""EasyGenerationMixin: greedy and sampled text generation, compiled once per shape bucket."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.errors import ArgumentError
from cairn.state.models.generation_arguments import (
    checked_prompt,
    checked_room,
    checked_rules,
    checked_sampling,
    config_value,
    end_tokens,
    longest_sequence,
    padding_token,
    sampling_key,
)
from cairn.state.models.generation_loop import Stop, with_cache, without_cache
from cairn.state.models.generation_settings import SAMPLING, merged_settings
from cairn.state.models.kv_cache import KVCache


class GenerationOutput(struct.PyTreeNode):
    """Tokens that `generate` returns.

    Attributes:
        sequences: int32 (batch, tokens): each prompt as it was given, then the new tokens, then
            padding up to the end of the longest row.
        lengths: int32 (batch,): number of new tokens of each row, the end-of-sequence token
            included.
    """

    sequences: jax.Array
    lengths: jax.Array


class EasyGenerationMixin:
    """Text generation for causal language models; fast if the forward pass takes a `cache`."""

    if TYPE_CHECKING:
        config: EDPretrainedConfig
        takes_cache: bool
        init_operations_cache: Callable[..., KVCache]

    def can_generate(self) -> bool:
        """Return whether `generate` works: the forward pass takes `input_ids`, `attention_mask`."""
        parameters = inspect.signature(type(self).__call__).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return "input_ids" in parameters and ("attention_mask" in parameters or takes_any)

    def generate(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        *,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        rng: Any = None,
        generation_config: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> GenerationOutput:
        """Continue each prompt.

        Settings that the call leaves out come from the model's generation_config.json. Without
        such settings, the likeliest token is taken each time. Prompts are padded to a few lengths
        ("buckets"), so that nearby lengths share one compilation. The model runs in evaluation mode
        (no dropout, running averages) and is not changed.

        With the same `rng`, a row's new tokens depend on its prompt and its number in the batch,
        not on other rows or on padding, except for rounding of the logits.

        Args:
            input_ids: integers (batch, tokens).
            attention_mask: 1 for tokens, 0 for padding, which must be on the left.
            max_new_tokens: maximum number of tokens to add, 20 by default. With the longest prompt
                they may be at most the config's `max_position_embeddings`, except with dynamic
                rotary positions, which have no limit.
            do_sample: whether to draw tokens at random; by default if `temperature` is above 0, or
                `top_p`, `top_k` or `min_p` is given.
            temperature: divisor of the logits, 1 by default; 0 takes the likeliest token.
            top_p: draw from the likeliest tokens whose probabilities sum up to this.
            top_k: draw from this many likeliest tokens, 0 for all. If it is not set, 50 if there
                are other settings (the file or `generation_config`), as in transformers; else all.
            eos_token_id: one or more tokens that end a row; () for none. By default those of the
                file, or without a file those of the config.
            pad_token_id: token after a row's end. By default that of the file or the config, else
                the first end-of-sequence token, else 0.
            rng: a JAX key, a seed or `nnx.Rngs`; seed 0 by default.
            generation_config: settings by name that replace the model's file; {} for no settings.
            **settings: further settings: `max_length`, `min_length`, `min_new_tokens`, `min_p`,
                `repetition_penalty`, `no_repeat_ngram_size`, `bad_words_ids`, `sequence_bias`,
                `suppress_tokens`, `begin_suppress_tokens`, `forced_bos_token_id`,
                `forced_eos_token_id` and `remove_invalid_values`. `max_length` and `min_length`
                include the prompt and its padding; no other setting counts padding.

        Raises:
            ArgumentError: an argument is out of range, arguments contradict each other, settings
                of the call or the file are not supported (all are listed), padding is not on the
                left, the tokens are more than the model can take, or the forward pass has not the
                arguments that this needs.
            ConversionError: generation_config.json holds no JSON object.

        Source: transformers' `GenerationConfig` defines the settings.
        """
        if not self.can_generate():
            raise ArgumentError(
                path=f"{type(self).__name__}.generate",
                expected="a forward pass that takes input_ids and attention_mask",
                found=str(inspect.signature(type(self).__call__)),
            )
        vocabulary = config_value(self.config, "vocab_size")
        prompt, mask = checked_prompt(input_ids, attention_mask, vocabulary)
        said = {
            "max_new_tokens": max_new_tokens,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        settings = merged_settings(self.config, generation_config, {**said, **settings})
        limit = checked_room(mask, settings, longest_sequence(self.config))
        sampling = checked_sampling(
            settings.get("do_sample"), **{name: settings.get(name) for name in SAMPLING}
        )
        eos = end_tokens(settings)
        pad = padding_token(settings, eos)
        rules = checked_rules(settings, width=prompt.shape[1], eos=eos, vocabulary=vocabulary)
        graphdef, state = nnx.split(self)
        run = with_cache if self.takes_cache else without_cache
        tokens, lengths = run(
            graphdef,
            state,
            prompt,
            mask,
            limit=jnp.int32(limit),
            stop=Stop(jnp.asarray(eos, jnp.int32), jnp.int32(pad)),
            rules=rules,
            sampling=sampling,
            key=sampling_key(rng),
        )
        # On the host: slicing and joining on a device would compile for each new length.
        new_tokens = np.asarray(tokens)[:, : int(np.asarray(lengths).max())]
        sequences = np.concatenate([np.asarray(input_ids).astype(np.int32), new_tokens], axis=1)
        return GenerationOutput(sequences=jax.device_put(sequences), lengths=lengths)

    def prepare_inputs_for_generation(
        self, input_ids: jax.Array, max_length: int, attention_mask: jax.Array | None = None
    ) -> dict[str, Any]:
        """Return the forward pass's arguments for the prompt, with an empty cache.

        Args:
            input_ids: integers (batch, tokens), padded on the left.
            max_length: slots of the cache, for prompt and new tokens together.
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
        """Return the forward pass's arguments for the next token of each row.

        Args:
            outputs: outputs of the last forward pass.
            next_tokens: the tokens that were chosen, integers (batch,).
            inputs: arguments of the last forward pass.
        """
        return {**inputs, "input_ids": next_tokens[:, None], "cache": outputs.cache}
