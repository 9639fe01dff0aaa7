"""Description of a model family, and its look-up.

A family is a module of the folder `known` that defines `FAMILY`; that it is there makes it known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cairn.interop import registry
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.rules import RuleTable
from cairn.interop.errors import ConfigError
from cairn.interop.families.config_form import ConfigForm
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm
from cairn.interop.families.names import Names


@dataclass(frozen=True)
class Family:
    """Description of a model family, for the rest of the code.

    Attributes:
        form: how its options lie in config.json.
        names: what its layers are called in Hugging Face's files; where that depends on the config,
            a function of it.
        gguf: the family's GGUF form, if it can be read here.
    """

    form: ConfigForm
    names: Names | Callable[[DecoderConfig], Names]
    gguf: GGUFForm | None = None

    @property
    def model_type(self) -> str:
        """As in config.json."""
        return self.form.model_type

    @property
    def architecture(self) -> str:
        """The class name that transformers gives its causal language model."""
        return self.form.architecture

    @property
    def known_keys(self) -> frozenset[str]:
        """Keys of config.json that `read_options` reads."""
        return self.form.known_keys

    @property
    def keys(self) -> Mapping[str, str]:
        """Options of the decoder that have another name in config.json -> that key."""
        return self.form.keys

    @property
    def nulls(self) -> frozenset[str]:
        """Keys of config.json whose null says something else than their absence."""
        return self.form.nulls

    def read_options(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of `DecoderConfig` for a config.json.

        Raises:
            ConfigError: keys are missing, or ask for what the decoder does not do.
        """
        return self.form.read_options(data)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the config.json of a `DecoderConfig`."""
        return self.form.write_config(config)

    def rules(self, config: DecoderConfig) -> RuleTable:
        """Return the table against Hugging Face's tensor names."""
        return self.names_of(config).rules(config)

    def names_of(self, config: DecoderConfig) -> Names:
        """Return the names of a model's layers."""
        return self.names if isinstance(self.names, Names) else self.names(config)


def get_family(model_type: str) -> Family:
    """Return the family of a `model_type`.

    Raises:
        ConfigError: unknown; the known ones are listed.
    """
    family: Family = registry.family(model_type)
    return family


def get_gguf_family(architecture: str, content: GGUFContent, *, path: str) -> Family:
    """Return the family of a GGUF file, which has a GGUF form.

    Raises:
        ConfigError: none has that architecture, and the known ones are listed; or none of its
            families has such files.
    """
    families = [get_family(model_type) for model_type in registry.known_families()]
    forms = [(family, family.gguf) for family in families if family.gguf is not None]
    alike = [(family, form) for family, form in forms if form.architecture == architecture]
    if not alike:
        listed = ", ".join(sorted({form.architecture for _, form in forms}))
        raise ConfigError(
            path=path,
            expected=f"general.architecture to be one of {listed}",
            found=repr(architecture),
            next_step="use the model's safetensors, if its family is known",
        )
    fitting = [family for family, form in alike if form.fits(content)]
    if len(fitting) != 1:
        names = ", ".join(family.model_type for family, _ in alike)
        raise ConfigError(
            path=path,
            expected=f"a {architecture!r} that is one of {names}",
            found="metadata and tensors that contradict each other",
            next_step="use the model's safetensors",
        )
    return fitting[0]
