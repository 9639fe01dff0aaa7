"""Check of `generate`'s arguments, and their conversion for the compiled loop."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from cairn.interop.errors import ArgumentError
from cairn.state.models.generation_loop import Sampling
from cairn.state.models.sampling import Biases, Rules

HostArray = np.ndarray[Any, Any]

_USUAL_NEW_TOKENS = 20
_LARGEST = int(np.iinfo(np.int32).max)


def checked_prompt(
    input_ids: Any, attention_mask: Any, vocabulary: int | None
) -> tuple[HostArray, HostArray]:
    """Return the prompt as int32 and the mask as bool, both (batch, tokens).

    Raises:
        ArgumentError: there are no token ids, rows have different lengths, ids are outside of the
            vocabulary, the mask has another shape or numbers other than 0 and 1, or padding is not
            on the left.
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


def checked_room(mask: HostArray, settings: Mapping[str, Any], longest: int | None) -> int:
    """Return the maximum number of tokens to add.

    Args:
        mask: bool (batch, tokens), False for padding.
        settings: settings of generation. A maximum length that the call itself does not set is
            reduced to what the model can take.
        longest: maximum number of tokens that the model can take; None for no limit.

    Raises:
        ArgumentError: a length is no positive integer, or prompt and new tokens together are more
            than the model can take.
    """
    new, width, tokens = _USUAL_NEW_TOKENS, mask.shape[1], int(mask.sum(axis=1).max())
    lengths = {"max_new_tokens", "max_length"} & settings.keys()
    if "max_new_tokens" in lengths:
        new = checked_integer("max_new_tokens", settings["max_new_tokens"], least=1)
    elif "max_length" in lengths:
        length = checked_integer("max_length", settings["max_length"], least=1)
        new = length - width
        if new < 1:
            raise ArgumentError(
                path="max_length",
                expected=f"more than the prompt's {width} tokens, padding included",
                found=length,
                next_step="pass max_new_tokens, which the prompt does not count for",
            )
    if lengths and settings["own_max_length"] and longest is not None:
        new = max(1, min(new, longest - tokens))
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
    do_sample: bool | None,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None = None,
) -> Sampling:
    """Return the settings that say how tokens are chosen.

    Raises:
        ArgumentError: a value is no number or out of range, or `do_sample` contradicts the others.
    """
    temperature, top_p = _number("temperature", temperature), _number("top_p", top_p)
    min_p = _number("min_p", min_p)
    if do_sample is not None and not isinstance(do_sample, bool | np.bool_):
        raise ArgumentError(path="do_sample", expected="True or False", found=repr(do_sample))
    if temperature is not None and not (temperature >= 0 and math.isfinite(temperature)):
        raise ArgumentError(path="temperature", expected="0 or more", found=temperature)
    if top_p is not None and not 0 < top_p <= 1:
        raise ArgumentError(path="top_p", expected="above 0, and at most 1", found=top_p)
    if min_p is not None and not 0 <= min_p <= 1:
        raise ArgumentError(path="min_p", expected="from 0 to 1", found=min_p)
    if top_k is not None:
        top_k = checked_integer("top_k", top_k, least=0)
    arguments = {"temperature": temperature or None, "top_p": top_p, "top_k": top_k, "min_p": min_p}
    present = {name: value for name, value in arguments.items() if value is not None}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    asked_for = {name: value for name, value in present.items() if value != neutral[name]}
    if do_sample is False and asked_for:
        raise ArgumentError(
            path="do_sample=False",
            expected="no arguments of sampling",
            found=", ".join(f"{name}={value}" for name, value in asked_for.items()),
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
        min_p=jnp.float32(min_p or 0.0),
        random=bool(do_sample or (present and do_sample is None)) and temperature != 0,
    )


def checked_integer(name: str, value: Any, *, least: int) -> int:
    """Return the value as an int.

    Raises:
        ArgumentError: the value is no integer, is below `least`, or does not fit int32.
    """
    number = _index(value)
    if number is None or not least <= number <= _LARGEST:
        raise ArgumentError(path=name, expected=f"an integer, {least} or more", found=repr(value))
    return number


def end_tokens(settings: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a row, according to the settings; empty if they name none.

    Raises:
        ArgumentError: the tokens are no integers.
    """
    return _token_ids("eos_token_id", settings.get("eos_token_id", ()))


def padding_token(settings: Mapping[str, Any], eos: tuple[int, ...]) -> int:
    """Return the token after a row's end: that of the settings, else the first of `eos`, else 0.

    Raises:
        ArgumentError: the token is no integer.
    """
    return _token("pad_token_id", settings.get("pad_token_id", next(iter(eos), 0)))


def checked_rules(
    settings: Mapping[str, Any], *, width: int, eos: tuple[int, ...], vocabulary: int | None
) -> Rules | None:
    """Return the rules that change logits before a token is chosen; None if there are none.

    Args:
        settings: settings of generation.
        width: tokens of a prompt, padding included.
        eos: tokens that end a row.
        vocabulary: size of the vocabulary; None if unknown.

    Raises:
        ArgumentError: a setting has a value of a wrong type or out of range, or the tokens that
            one forces are all suppressed by another.
    """
    rules: dict[str, Any] = {}
    biases = _sequence_bias(settings.get("sequence_bias"), vocabulary)
    if biases:
        rules["biases"] = _biases(biases)
    penalty = _number("repetition_penalty", settings.get("repetition_penalty"))
    if penalty is not None and not (penalty > 0 and math.isfinite(penalty)):
        raise ArgumentError(path="repetition_penalty", expected="above 0", found=penalty)
    if penalty not in (None, 1.0):
        rules["penalty"] = jnp.float32(penalty)
    ngram = checked_integer(
        "no_repeat_ngram_size", settings.get("no_repeat_ngram_size", 0), least=0
    )
    if ngram:
        rules["ngram"] = ngram
    words = _sequences("bad_words_ids", settings.get("bad_words_ids", ()), vocabulary)
    # End tokens are not forbidden, else no row could end.
    forbidden = {word: -math.inf for word in words if word not in {(token,) for token in eos}}
    if forbidden:
        rules["forbidden"] = _biases(forbidden)
    if "min_new_tokens" in settings:
        least = checked_integer("min_new_tokens", settings["min_new_tokens"], least=0)
    else:
        length = checked_integer("min_length", settings.get("min_length", 0), least=0)
        least = max(0, length - width)
    if least and eos:
        rules["least"] = jnp.int32(least)
    first = settings.get("forced_bos_token_id")
    if first is not None and width == 1:
        rules["first"] = _ids("forced_bos_token_id", first, vocabulary)
    last = settings.get("forced_eos_token_id")
    if last is not None and np.size(last):
        rules["last"] = _ids("forced_eos_token_id", last, vocabulary)
    finite = settings.get("remove_invalid_values", False)
    if not isinstance(finite, bool):
        raise ArgumentError(
            path="remove_invalid_values", expected="True or False", found=repr(finite)
        )
    if finite:
        rules["finite"] = True
    for name, rule in (
        ("suppress_tokens", "suppressed"),
        ("begin_suppress_tokens", "suppressed_first"),
    ):
        if np.size(settings.get(name, ())):
            rules[rule] = _ids(name, settings[name], vocabulary)
    _refuse_suppressed(rules, settings)
    if "suppressed_first" in rules:
        rules["beginning"] = jnp.int32(1 if width == 1 and first is not None else 0)
    return Rules(**rules) if rules else None


def _refuse_suppressed(rules: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ArgumentError if forced tokens are all suppressed: token 0 would be chosen instead."""
    suppressed = {int(token) for token in rules.get("suppressed", ())}
    for name, rule in (("forced_bos_token_id", "first"), ("forced_eos_token_id", "last")):
        if rule in rules and {int(token) for token in rules[rule]} <= suppressed:
            raise ArgumentError(
                path=name,
                expected="a token that is not among suppress_tokens",
                found=repr(settings[name]),
                next_step="leave it out there; to put an end off, say min_new_tokens",
            )


def _sequence_bias(value: Any, vocabulary: int | None) -> dict[tuple[int, ...], float]:
    """Return the biases by token sequence, checked; empty for None.

    Args:
        value: a dict from tuples of tokens to numbers, or a list of pairs (tokens, number), as in
            JSON.
        vocabulary: size of the vocabulary; None if unknown.

    Raises:
        ArgumentError: `value` is neither, or has tokens outside of the vocabulary.
    """
    if value is None:
        return {}
    pairs = [*value.items()] if isinstance(value, Mapping) else value
    try:
        sequences, numbers = zip(*pairs, strict=True) if pairs else ((), ())
    except (TypeError, ValueError) as exc:
        raise ArgumentError(
            path="sequence_bias",
            expected="pairs of token ids and a number",
            found=repr(value),
        ) from exc
    named = _sequences("sequence_bias", sequences, vocabulary)
    floats = [_number("sequence_bias", number) or 0.0 for number in numbers]
    if any(math.isnan(number) for number in floats):
        raise ArgumentError(path="sequence_bias", expected="numbers", found=repr(value))
    return dict(zip(named, floats, strict=True))


def _sequences(name: str, value: Any, vocabulary: int | None) -> list[tuple[int, ...]]:
    try:
        sequences = [_token_ids(name, sequence) for sequence in value if np.ndim(sequence) == 1]
        whole = len(sequences) == len(value) and all(sequences)
    except (TypeError, ValueError):
        whole, sequences = False, []
    if not whole:
        raise ArgumentError(
            path=name, expected="lists of token ids, none of them empty", found=repr(value)
        )
    for sequence in sequences:
        _in_vocabulary(name, sequence, vocabulary)
    return sequences


def _biases(biases: Mapping[tuple[int, ...], float]) -> tuple[Biases, ...]:
    """Return biases in groups of sequences of equal length, shortest first.

    So the order of the settings causes no new compilation.
    """
    groups: dict[int, list[tuple[int, ...]]] = {}
    for sequence in biases:
        groups.setdefault(len(sequence), []).append(sequence)
    groups_of_biases = []
    for _, group in sorted(groups.items()):
        tokens = np.array(group, np.int32)
        values = np.array([biases[sequence] for sequence in group], np.float32)
        groups_of_biases.append(
            Biases(jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, -1]), jnp.asarray(values))
        )
    return tuple(groups_of_biases)


def _ids(name: str, value: Any, vocabulary: int | None) -> jax.Array:
    tokens = _token_ids(name, value)
    _in_vocabulary(name, tokens, vocabulary)
    return jnp.asarray(tokens, jnp.int32)


def _in_vocabulary(name: str, tokens: Sequence[int], vocabulary: int | None) -> None:
    outside = [token for token in tokens if token < 0 or (vocabulary and token >= vocabulary)]
    if outside:
        highest = "" if vocabulary is None else f" to {vocabulary - 1}"
        raise ArgumentError(path=name, expected=f"token ids from 0{highest}", found=outside)


def config_value(config: Any, name: str) -> Any:
    """Return a field of a config, or of the config.json it was read from; None without either."""
    extra = getattr(config, "hf_extra", {})
    return getattr(config, name, extra.get(name))


def longest_sequence(config: Any) -> int | None:
    """Return the maximum number of tokens that a model can take; None for no limit."""
    if hasattr(config, "longest_sequence"):
        own: int | None = config.longest_sequence
        return own
    positions: int | None = config_value(config, "max_position_embeddings")
    return positions


def sampling_key(rng: Any) -> jax.Array:
    """Return a JAX key from a key, a seed or `nnx.Rngs`; None gives the key of seed 0.

    Raises:
        ArgumentError: `rng` is none of these.
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
    if value is None:
        return None
    try:
        if isinstance(value, str | bool | np.bool_):  # float() takes these too
            raise TypeError
        return float(value)
    except (TypeError, ValueError) as exc:
        raise ArgumentError(path=name, expected="a number", found=repr(value)) from exc


def _index(value: Any) -> int | None:
    """Return the value as an int; None if it is no integer, or a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _token(name: str, value: Any) -> int:
    token = _index(value)
    if token is None or abs(token) > _LARGEST:
        raise ArgumentError(path=name, expected="integers", found=repr(value))
    return token


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    # NumPy would convert True and False among integers to integers.
    tokens = value if isinstance(value, list | tuple) else np.atleast_1d(value).tolist()
    return tuple(_token(name, token) for token in tokens)
