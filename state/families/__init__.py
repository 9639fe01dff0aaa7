"""Model families: for each a config reader, a config writer and rule tables. JAX-free.

A family is a module of this folder that defines `FAMILY`; adding its name to `_MODULES` is all
that makes it known.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cairn.state.errors import ConfigError
from cairn.state.weight_rules import RuleTable

if TYPE_CHECKING:
    from cairn.state.decoder.config import DecoderConfig

_MODULES = {"llama": "cairn.state.families.llama"}
"""model_type -> module."""

OURS_ALONE = frozenset(
    {
        "partition_axis",
        "remat",
        "scan_layers",
        "shard_attention_computation",
        "sharding_axis_dims",
        "sharding_axis_names",
        "sharding_dcn_axis_dims",
        "tokenizer_files",
    }
)
"""Fields that say how a model runs, not what it is: no family writes them."""


@dataclass(frozen=True)
class GGUFForm:
    """How a family lies in a GGUF file whose architecture is its `model_type`.

    Attributes:
        config: metadata, without the architecture's prefix -> config.json.
        rules: config -> table against GGUF's tensor names.
    """

    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    rules: Callable[[DecoderConfig], RuleTable]


@dataclass(frozen=True)
class Family:
    """What the rest of the code knows of a family.

    Attributes:
        model_type: as in config.json.
        architecture: the class name that transformers gives its causal language model.
        read_options: config.json -> keyword arguments of `DecoderConfig`.
        write_config: `DecoderConfig` -> config.json.
        rules: config -> table against Hugging Face's tensor names.
        gguf: the family's GGUF form, if it can be read here.
    """

    model_type: str
    architecture: str
    read_options: Callable[[Mapping[str, Any]], dict[str, Any]]
    write_config: Callable[[DecoderConfig], dict[str, Any]]
    rules: Callable[[DecoderConfig], RuleTable]
    gguf: GGUFForm | None = None


def known_model_types() -> list[str]:
    """Every family's `model_type`, sorted."""
    return sorted(_MODULES)


@functools.cache
def get(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ConfigError: unknown; the known ones are listed.
    """
    if model_type not in _MODULES:
        raise ConfigError(
            path="model_type",
            expected=f"one of {', '.join(known_model_types())}",
            found=repr(model_type),
            next_step="convert the model to a known family, or add a module to state/families",
        )
    family: Family = importlib.import_module(_MODULES[model_type]).FAMILY
    return family


def get_gguf(architecture: str, *, path: str) -> tuple[Family, GGUFForm]:
    """The family of a GGUF architecture, and its GGUF form.

    Raises:
        ConfigError: none has that architecture; the known ones are listed.
    """
    known = [get(model_type) for model_type in known_model_types()]
    readable = {family.model_type: (family, family.gguf) for family in known if family.gguf}
    if architecture not in readable:
        raise ConfigError(
            path=path,
            expected=f"general.architecture to be one of {', '.join(readable)}",
            found=repr(architecture),
            next_step="use the model's safetensors, if its family is known",
        )
    return readable[architecture]


def read_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments of `DecoderConfig` that a config.json stands for.

    Raises:
        ConfigError: the family is unknown, or asks for what the decoder can't do.
    """
    return get(str(data.get("model_type"))).read_options(data)


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """The config.json of a decoder, without nulls.

    What is written is read again: an option that the family has no key for would come back
    changed, and is refused instead of being dropped.

    Raises:
        ConfigError: the family can't express an option; each is named.
    """
    family = get(config.model_type)
    data = {name: value for name, value in family.write_config(config).items() if value is not None}
    again = type(config)(**family.read_options(data))
    lost = [
        f"{name}={ours!r} would come back as {theirs!r}"
        for name in config.__dataclass_fields__
        if name not in OURS_ALONE and name != "hf_extra"
        for ours, theirs in [(getattr(config, name), getattr(again, name))]
        if ours != theirs
    ]
    if lost:
        raise ConfigError(
            path=f"{type(config).__name__}.to_hf",
            expected=f"options that a {config.model_type!r} config.json can express",
            found="; ".join(lost),
            next_step="change these options, or choose a model_type that has them",
        )
    return data
