"""Metadata and tensors of a GGUF file, made of the tables that read such files.

Nothing is taken on trust: what is made is read again, and a model of which a file would say
something else is refused.
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
"""Options that change no number of a forward pass: no GGUF file has them."""
_CLOSE = 1e-6  # numbers of metadata have 32 bits


@dataclass(frozen=True)
class GGUFModel:
    """Metadata and tensors that describe a model in a GGUF file.

    Attributes:
        architecture: as in "general.architecture".
        metadata: of the architecture, with its prefix.
        tensors: those that say more of it, by name; float32.
    """

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Array]


def gguf_model(config: DecoderConfig, shapes: Mapping[str, Shape]) -> GGUFModel:
    """Return the metadata of a model's file.

    Args:
        config: of the model.
        shapes: of the file's weights, by their names in it.

    Raises:
        ConfigError: its family has no GGUF files, or such a file can't say some of its options;
            all of them are named.
    """
    form = _form(config)
    config = loadable(form.engine, config, form.architecture)
    said = config.to_hf()
    metadata = {
        key: said[name] for key, name in {**form.sizes, **form.options}.items() if name in said
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    if "feed_forward_length" in form.sizes:
        metadata["feed_forward_length"] = config.intermediate_size  # GPT-2 may leave it out
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
    """Return whether a file has the embedding twice, as llama.cpp loads none without a head."""
    return config.tie_word_embeddings and _form(config).engine.needs_head


def gguf_rules(config: DecoderConfig) -> RuleTable:
    """Return the rule table between a model's leaves and the tensors of its GGUF file.

    Raises:
        ConfigError: its family has no GGUF files.
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
    """Read what was made, and compare; another family may read it that computes the same."""
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
        # A factor of cosines and sines that follows from the scaling is no option of its own.
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
