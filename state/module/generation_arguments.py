"""The arguments of `generate`, checked and in the form that the compiled loop takes."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cairn.state.errors import ArgumentError
from cairn.state.module.generation_loop import Sampling
from cairn.state.weights import parse_json

HostArray = np.ndarray[Any, Any]

GENERATION_FILE = "generation_config.json"
"""Where transformers keeps a model's end tokens; config.json may name fewer of them."""


def checked_prompt(
    input_ids: Any, attention_mask: Any, vocabulary: int | None
) -> tuple[HostArray, HostArray]:
    """The prompt as int32 and the mask as bool, both (batch, tokens).

    Raises:
        ArgumentError: no token ids, rows of different lengths, ids outside of the vocabulary, a
            mask of another shape or of other numbers than 0 and 1, or padding elsewhere than on
            the left.
    """
    try:
        prompt = np.asarray(input_ids)
    except ValueError as exc:
        raise ArgumentError(
            path="input_ids",
            expected="rows of one length",
            found=str(exc),
            next_step="pad the shorter ones on the left, and pass attention_mask",
        ) from exc
    if prompt.ndim != 2 or 0 in prompt.shape or not np.issubdtype(prompt.dtype, np.integer):
        raise ArgumentError(
            path="input_ids",
            expected="integers of shape (batch, tokens), neither of them 0",
            found=f"{prompt.dtype} of shape {prompt.shape}",
        )
    mask = np.ones(prompt.shape, bool) if attention_mask is None else np.asarray(attention_mask)
    if mask.shape != prompt.shape or not np.isin(mask, (0, 1)).all():
        raise ArgumentError(
            path="attention_mask",
            expected=f"zeros and ones of shape {prompt.shape}",
            found=f"{mask.dtype} of shape {mask.shape}, from {mask.min()} to {mask.max()}",
        )
    mask = mask.astype(bool)
    good = mask[:, -1] & ~(mask[:, :-1] & ~mask[:, 1:]).any(axis=1)
    if not good.all():
        raise ArgumentError(
            path="attention_mask",
            expected="padding on the left only: zeros, then ones up to the end of each row",
            found=f"other rows: {np.flatnonzero(~good).tolist()}",
            next_step="set the tokenizer's padding_side to 'left'",
        )
    tokens = prompt[mask]
    if vocabulary is not None and (tokens.min() < 0 or tokens.max() >= vocabulary):
        raise ArgumentError(
            path="input_ids",
            expected=f"token ids from 0 to {vocabulary - 1}",
            found=f"ids from {tokens.min()} to {tokens.max()}",
        )
    return np.where(mask, prompt, 0).astype(np.int32), mask


def checked_room(mask: HostArray, max_new_tokens: int, longest: int | None) -> int:
    """`max_new_tokens`, if the longest prompt leaves that much room.

    Args:
        mask: bool (batch, tokens), False for padding.
        max_new_tokens: most tokens to add.
        longest: tokens that the model can take at most; None for no limit.

    Raises:
        ArgumentError: not a positive integer, or more than there is room for.
    """
    new = checked_integer("max_new_tokens", max_new_tokens, least=1)
    tokens = int(mask.sum(axis=1).max())
    if longest is not None and tokens + new > longest:
        raise ArgumentError(
            path="max_new_tokens",
            expected=f"prompt + max_new_tokens to be at most the model's "
            f"max_position_embeddings, {longest}",
            found=f"{tokens} + {new} = {tokens + new}",
            next_step=f"ask for at most {longest - tokens} new tokens"
            if tokens < longest
            else "shorten the prompt",
        )
    return new


def checked_sampling(
    do_sample: bool | None, temperature: float | None, top_p: float | None, top_k: int | None
) -> Sampling:
    """How tokens are chosen.

    Raises:
        ArgumentError: no number, a value out of range, or `do_sample` contradicts the others.
    """
    temperature, top_p = _number("temperature", temperature), _number("top_p", top_p)
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise ArgumentError(path="temperature", expected="0 or more", found=temperature)
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentError(path="top_p", expected="above 0, and at most 1", found=top_p)
    if top_k is not None:
        top_k = checked_integer("top_k", top_k, least=0)
    given = {"temperature": temperature or None, "top_p": top_p, "top_k": top_k}
    asked = {name: value for name, value in given.items() if value is not None}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    asked_for = {name: value for name, value in asked.items() if value != neutral[name]}
    if do_sample is False and asked_for:
        raise ArgumentError(
            path="do_sample=False", expected="no arguments of sampling", found=_listed(asked_for)
        )
    if do_sample and temperature == 0:
        raise ArgumentError(
            path="do_sample=True", expected="a temperature above 0", found=temperature
        )
    smallest = float(np.finfo(np.float32).tiny)
    return Sampling(
        temperature=jnp.float32(max(temperature or 1.0, smallest)),
        top_p=jnp.float32(1.0 if top_p is None else max(top_p, smallest)),
        top_k=jnp.int32(top_k or 0),
        random=bool(do_sample or (asked and do_sample is None)) and temperature != 0,
    )


def checked_integer(name: str, value: Any, *, least: int) -> int:
    """The value as an int.

    Raises:
        ArgumentError: it is no integer, or below `least`.
    """
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ArgumentError(path=name, expected=f"an integer, {least} or more", found=repr(value))
    return number


def end_tokens(config: Any, given: int | Sequence[int] | None) -> tuple[int, ...]:
    """The tokens that end a row: those given, else the model's own, else none.

    Raises:
        ArgumentError: they are no integers.
    """
    value = generation_value(config, "eos_token_id") if given is None else given
    if value is None:
        return ()
    return tuple(_token("eos_token_id", token) for token in np.atleast_1d(value))


def padding_token(config: Any, given: int | None, eos: tuple[int, ...]) -> int:
    """The token after a row's end: the one given, else the model's own, else the first of `eos`.

    Raises:
        ArgumentError: it is no integer.
    """
    value = generation_value(config, "pad_token_id") if given is None else given
    return _token("pad_token_id", next(iter(eos), 0) if value is None else value)


def generation_value(config: Any, name: str) -> Any:
    """What generation_config.json says, if the model came with one, else the config's field.

    Raises:
        ConversionError: the file holds no JSON object.
    """
    raw = getattr(config, "tokenizer_files", {}).get(GENERATION_FILE)
    said = None if raw is None else parse_json(raw, GENERATION_FILE).get(name)
    return config_value(config, name) if said is None else said


def config_value(config: Any, name: str) -> Any:
    """A field of the config, or of the config.json that it was read from; None if in neither."""
    extra = getattr(config, "hf_extra", {})
    return getattr(config, name, extra.get(name))


def sampling_key(rng: Any) -> jax.Array:
    """A JAX key from a key, a seed or `nnx.Rngs`; that of seed 0 from None.

    Raises:
        ArgumentError: it is none of these.
    """
    if isinstance(rng, nnx.Rngs):
        drawn: jax.Array = rng()
        return drawn
    if isinstance(rng, jax.Array | np.ndarray):
        is_key = rng.ndim == 0 and jnp.issubdtype(rng.dtype, jax.dtypes.prng_key)
        is_raw_key = rng.ndim == 1 and rng.dtype == np.uint32
        if is_key or is_raw_key:
            return jnp.asarray(rng)
    try:
        return jax.random.key(0 if rng is None else operator.index(rng))
    except TypeError as exc:
        raise ArgumentError(
            path="rng", expected="one JAX key, a seed or nnx.Rngs", found=repr(rng)
        ) from exc


def _number(name: str, value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError) as exc:
        raise ArgumentError(path=name, expected="a number", found=repr(value)) from exc


def _token(name: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError as exc:
        raise ArgumentError(path=name, expected="integers", found=repr(value)) from exc


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
