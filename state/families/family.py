"""What the rest of the code knows of a family, and where it is looked up.

A family is a module of this folder that defines `FAMILY`; an entry in `registry.FAMILIES` is all
that makes it known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.state import registry
from cairn.state.config import DecoderConfig
from cairn.state.conversion import RuleTable
from cairn.state.errors import ConfigError


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
        known_keys: keys of config.json that `read_options` reads.
        read_options: config.json -> keyword arguments of `DecoderConfig`.
        write_config: `DecoderConfig` -> config.json.
        rules: config -> table against Hugging Face's tensor names.
        gguf: the family's GGUF form, if it can be read here.
    """

    model_type: str
    architecture: str
    known_keys: frozenset[str]
    read_options: Callable[[Mapping[str, Any]], dict[str, Any]]
    write_config: Callable[[DecoderConfig], dict[str, Any]]
    rules: Callable[[DecoderConfig], RuleTable]
    gguf: GGUFForm | None = None


def get_family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
        ConfigError: unknown; the known ones are listed.
    """
    found: Family = registry.family(model_type)
    return found


def get_gguf_family(architecture: str, *, path: str) -> tuple[Family, GGUFForm]:
    """The family of a GGUF architecture, and its GGUF form.

    Raises:
        ConfigError: none has that architecture; the known ones are listed.
    """
    known = [get_family(model_type) for model_type in registry.known_families()]
    readable = {family.model_type: (family, family.gguf) for family in known if family.gguf}
    if architecture not in readable:
        raise ConfigError(
            path=path,
            expected=f"general.architecture to be one of {', '.join(readable)}",
            found=repr(architecture),
            next_step="use the model's safetensors, if its family is known",
        )
    return readable[architecture]
