"""Description of a model family, and its look-up.

A family is a module in the folder `known` that defines `FAMILY`; it needs no other registration.
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
    """Description of a model family.

    Attributes:
        form: the keys of config.json that hold the options.
        names: the layers' names in Hugging Face's files, or a function from the config to them.
        gguf: the keys and names of GGUF files; None: they are neither read nor written.
    """

    form: ConfigForm
    names: Names | Callable[[DecoderConfig], Names]
    gguf: GGUFForm | None = None

    @property
    def model_type(self) -> str:
        """Value of `model_type` in config.json."""
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
        """Options whose key in config.json has another name: option -> key."""
        return self.form.keys

    @property
    def nulls(self) -> frozenset[str]:
        """Keys of config.json whose null differs in meaning from their absence."""
        return self.form.nulls

    def read_options(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of `DecoderConfig` for a config.json.

        Raises:
            ConfigError: keys are missing, or ask for something that the decoder can't do.
        """
        return self.form.read_options(data)

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the config.json of a `DecoderConfig`."""
        return self.form.write_config(config)

    def rules(self, config: DecoderConfig) -> RuleTable:
        """Return the rule table between the model's leaves and Hugging Face's tensors."""
        return self.names_of(config).rules(config)

    def names_of(self, config: DecoderConfig) -> Names:
        """Return the names of the layers of a model with this config."""
        return self.names if isinstance(self.names, Names) else self.names(config)


def get_family(model_type: str) -> Family:
    """Return the family of a `model_type`.

    Raises:
        ConfigError: no family has it; the known values are listed.
    """
    family: Family = registry.family(model_type)
    return family


def get_gguf_family(architecture: str, content: GGUFContent, *, path: str) -> Family:
    """Return the family of a GGUF file; its `gguf` is not None.

    Raises:
        ConfigError: no family has that architecture (the known ones are listed), or the file fits
            none of those that have.
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
