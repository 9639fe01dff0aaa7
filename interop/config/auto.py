"""AutoEasyDeLConfig: the configuration class of a `model_type`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from cairn.interop import registry
from cairn.interop.config.base import EDPretrainedConfig, defined_configs
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.errors import ConfigError, InteropError


class AutoEasyDeLConfig:
    """Finds the configuration class of a `model_type`."""

    @staticmethod
    def known_model_types() -> list[str]:
        """Return every `model_type` that can be read, sorted."""
        return sorted({*registry.known_families(), *defined_configs()})

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> EDPretrainedConfig:
        """Return the config whose `to_dict` returned `data`.

        Raises:
            ConfigError: `model_type` is absent or unknown; the known ones are listed. Or a value is
                of another type than its field.
        """
        return _read(data, "from_dict")

    @staticmethod
    def from_hf(data: Mapping[str, Any]) -> EDPretrainedConfig:
        """Return the config of a Hugging Face config.json.

        Raises:
            ConfigError: `model_type` is absent or unknown; the known ones are listed. Or a value is
                of another type than its field.
        """
        return _read(data, "from_hf")

    @staticmethod
    def hf_keys(data: Mapping[str, Any]) -> frozenset[str]:
        """Return the keys that `from_hf` reads from a config.json with the `model_type` of `data`.

        Raises:
            ConfigError: `model_type` is absent or unknown; the known ones are listed.
        """
        if registry.is_family(data.get("model_type")):
            keys: frozenset[str] = registry.family(str(data["model_type"])).known_keys
            return keys
        config_class = _class_of(data, "hf_keys")
        return frozenset(entry.name for entry in fields(config_class)) - config_class.JSON_EXCLUDED


def _read(data: Mapping[str, Any], method: str) -> EDPretrainedConfig:
    reader: Callable[[Mapping[str, Any]], EDPretrainedConfig]
    reader = getattr(_class_of(data, method), method)
    try:
        return reader(data)
    except InteropError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise ConfigError(
            path=f"AutoEasyDeLConfig.{method}",
            expected="values of the types that the fields have",
            found=f"{type(exc).__name__}: {exc}"[:200],
            next_step="correct the config of the model",
        ) from exc


def _class_of(data: Mapping[str, Any], method: str) -> type[EDPretrainedConfig]:
    model_type = data.get("model_type")
    config_class = defined_configs().get(str(model_type))
    if isinstance(model_type, str) and registry.is_family(model_type):
        config_class = DecoderConfig
    if config_class is None:
        raise ConfigError(
            path=f"AutoEasyDeLConfig.{method}",
            expected=f"model_type to be one of {', '.join(AutoEasyDeLConfig.known_model_types())}",
            found=repr(model_type),
            next_step="import the module whose subclass of EDPretrainedConfig has this model_type",
        )
    return config_class
