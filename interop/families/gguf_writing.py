"""Metadata and tensors of a GGUF file, made from the tables that read such files.

The metadata is read again at once. A model is refused if reading returns another config.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.interop.config.decoder import OURS_ALONE, DecoderConfig
from cairn.interop.config.frequencies import attention_factor
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.conversion.rules import RuleTable
from cairn.interop.families.family import get_family, get_gguf_family
from cairn.interop.families.gguf_engine import loadable, no_gguf_file
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm
from cairn.interop.families.gguf_rope import rope_to_gguf

__all__ = ["GGUFModel", "gguf_head_is_written", "gguf_model", "gguf_rules"]

_SAID_ELSEWHERE = frozenset(
    {"model_type", "bos_token_id", "eos_token_id", "pad_token_id", "hf_extra"}
)
_NO_NUMBERS = frozenset({"initializer_range", "architectures", "name_or_path", "dtype"})
"""Options that change no number of a forward pass and that no GGUF file has."""
_CLOSE = 1e-6  # metadata is float32


@dataclass(frozen=True)
class GGUFModel:
    """Metadata and tensors that describe a model in a GGUF file.

    Attributes:
        architecture: value of "general.architecture".
        metadata: the architecture's metadata, by keys with the architecture's prefix.
        tensors: float32 tensors that describe the model besides its weights, by name.
    """

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Array]


def gguf_model(config: DecoderConfig, shapes: Mapping[str, Shape]) -> GGUFModel:
    """Return the metadata and tensors that describe a model in its file.

    Args:
        config: config of the model.
        shapes: shapes of the file's weights, by their names in the file.

    Raises:
        ConfigError: the family has no GGUF files, or such a file can't hold some options; all are
            named.
    """
    form = _form(config)
    config = loadable(form.engine, config, form.architecture)
    said = config.to_hf()
    metadata = {
        key: said[name] for key, name in {**form.sizes, **form.options}.items() if name in said
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    if "feed_forward_length" in form.sizes:
        metadata["feed_forward_length"] = config.intermediate_size  # GPT-2 may lack it
    metadata |= {"vocab_size": config.vocab_size, "attention.head_count_kv": config.kv_heads}
    if "attention.key_length" not in form.also_read:
        lengths = ("attention.key_length", "attention.value_length")
        metadata |= dict.fromkeys(lengths, config.head_size)
    tensors: dict[str, Array] = {}
    if form.rope and config.rope is not None:
        rope, tensors = rope_to_gguf(config.rope, config.rotary_size)
        metadata |= rope
    if form.write is not None:
        metadata |= form.write(config, said)
    _check(form, config, metadata, shapes, tensors)
    prefixed = {f"{form.architecture}.{key}": value for key, value in metadata.items()}
    return GGUFModel(form.architecture, prefixed, tensors)


def gguf_head_is_written(config: DecoderConfig) -> bool:
    """Return whether a tied model's file has the embedding a second time, as its head.

    llama.cpp loads files of some architectures only with a head.
    """
    return config.tie_word_embeddings and _form(config).engine.needs_head


def gguf_rules(config: DecoderConfig) -> RuleTable:
    """Return the rule table between a model's leaves and the tensors of its GGUF file.

    Raises:
        ConfigError: the family has no GGUF files.
    """
    return _form(config).rules(config)


def _form(config: DecoderConfig) -> GGUFForm:
    form = get_family(config.model_type).gguf
    if form is None:
        raise no_gguf_file(config, "a family that has GGUF files", config.model_type)
    return form


def _check(
    form: GGUFForm,
    config: DecoderConfig,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, Shape],
    tensors: Mapping[str, Array],
) -> None:
    """Raise ConfigError if reading the metadata and tensors returns other options than `config`.

    Another family may read them, if its options are the same.
    """
    rounded = {key: _as_stored(value) for key, value in metadata.items()}
    everything = {**shapes, **{name: array.shape for name, array in tensors.items()}}
    content = GGUFContent(rounded, everything, lambda name: tensors[name])
    family = get_gguf_family(form.architecture, content, path=f"{config.model_type} as GGUF")
    reader = family.gguf or form
    again = DecoderConfig(**family.read_options(reader.config(content, family.model_type)))
    pairs = zip(_plain(config).items(), _plain(again).values(), strict=True)
    lost = [
        f"{name}={before!r} (it would be {after!r})"
        for (name, before), after in pairs
        if not _alike(before, after)
    ]
    if lost:
        raise no_gguf_file(config, "options that a GGUF file can say", "; ".join(lost))


def _plain(config: DecoderConfig) -> dict[str, Any]:
    """Return the options that change numbers, with defaults filled in."""
    left_out = OURS_ALONE | _SAID_ELSEWHERE | _NO_NUMBERS
    names = [field.name for field in dataclasses.fields(config) if field.name not in left_out]
    options = {name: getattr(config, name) for name in names}
    options |= {"head_dim": config.head_size, "num_key_value_heads": config.kv_heads}
    rope = config.rope
    if rope is not None:
        # An explicit `attention_factor` that equals the default counts as the default.
        factor = rope.attention_factor
        usual = dataclasses.replace(rope, attention_factor=None)
        if factor is not None and np.isclose(factor, attention_factor(usual), rtol=_CLOSE, atol=0):
            factor = None
        options["rope"] = dataclasses.replace(
            rope,
            beta_fast=32.0 if rope.beta_fast is None else rope.beta_fast,
            beta_slow=1.0 if rope.beta_slow is None else rope.beta_slow,
            attention_factor=factor,
        )
    return options


def _as_stored(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_as_stored(number) for number in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def _alike(first: Any, second: Any) -> bool:
    """Return whether two options are equal up to rounding to float32."""
    if dataclasses.is_dataclass(first) and type(first) is type(second):
        names = [field.name for field in dataclasses.fields(first)]
        return all(_alike(getattr(first, name), getattr(second, name)) for name in names)
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(_alike, first, second))
    if isinstance(first, float) and isinstance(second, float):
        return bool(np.isclose(first, second, rtol=_CLOSE, atol=0))
    return bool(first == second)
