"""A family's config.json as a table: the option of the decoder for each key."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cairn.interop.config.decoder import FULL, WINDOW, DecoderConfig
from cairn.interop.config.hf_keys import DROPOUTS
from cairn.interop.config.rope import RopeConfig
from cairn.interop.errors import ConfigError
from cairn.interop.families.hf_config import (
    INERT_ROPE_KEYS,
    activation_from_hf,
    activation_to_hf,
    refused_keys,
    required,
    rope_from_hf,
    rope_to_hf,
)
from cairn.interop.families.key_kinds import Kind, wrong_kinds

__all__ = ["SIZES", "ConfigForm", "Refused", "usual_options", "windows_from_hf"]

SIZES: Mapping[str, str] = MappingProxyType(
    {
        name: name
        for name in (
            *("hidden_size", "intermediate_size", "max_position_embeddings"),
            *("num_attention_heads", "num_hidden_layers", "vocab_size"),
        )
    }
)
"""Keys that most families' config.json must have -> options of the decoder."""

_READ_BY_ALL = frozenset({"architectures", "model_type", "quantization_config"}) | DROPOUTS
_ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
_DROPPED = frozenset({"dtype", "torch_dtype", "_name_or_path"})
"""Keys of config.json that describe the stored file, not the model."""


@dataclass(frozen=True)
class Refused:
    """Key that is refused unless its value asks for what the decoder does anyway.

    Attributes:
        allowed: accepted values, which are kept for `to_hf`.
        why: reason that other values are refused, for the message.
    """

    allowed: tuple[Any, ...]
    why: str


def usual_options(**changes: Any) -> dict[str, tuple[str, Any]]:
    """Return key -> (option, its value if the key is absent), for keys that most families have.

    Args:
        **changes: key -> the same pair for this family, or None to leave the key out.
    """
    usual: dict[str, Any] = {
        "head_dim": ("head_dim", None),
        "initializer_range": ("initializer_range", 0.02),
        "num_key_value_heads": ("num_key_value_heads", None),
        "rms_norm_eps": ("rms_norm_eps", 1e-6),
        "tie_word_embeddings": ("tie_word_embeddings", False),
        **changes,
    }
    return {key: option for key, option in usual.items() if option is not None}


def windows_from_hf(
    data: Mapping[str, Any], options: Mapping[str, Any], windowed: Callable[[int], bool]
) -> dict[str, Any]:
    """Return the option `layer_types`: from config.json, else from `windowed`.

    Args:
        data: content of config.json, which may have `layer_types`.
        options: options read so far, `num_hidden_layers` among them.
        windowed: layer number -> whether the layer has a window if `layer_types` is absent.
    """
    count = options["num_hidden_layers"]
    types = data.get("layer_types")
    if types is None:
        types = [WINDOW if windowed(number) else FULL for number in range(count)]
    return {"layer_types": tuple(types)}


@dataclass(frozen=True)
class ConfigForm:
    """Mapping of a decoder's options to a family's config.json.

    Attributes:
        model_type: value of this key in config.json.
        architecture: the class name that transformers gives its causal language model.
        sizes: required keys -> options.
        options: optional keys -> (option, its value if the key is absent, as in transformers).
        fixed: options that all models of the family share; no key has them.
        refused: keys of which only some values are accepted.
        activation: key of the activation, and its value if the key is absent.
        rope_theta: base of the rotary positions if no key has it; None: the family has no rotary
            positions, or `read` reads them.
        rotary_fraction: key of the rotated share of each head, and its default; None: whole heads
            are rotated.
        rope_original: context length of pretraining if no key of the model has it; a scaling that
            needs one must not have another. None: the scaling's key has it.
        rope_names: older names of rotary scalings -> today's names.
        rotary_theta: key of the base of the rotary positions.
        also_read: keys that `read` reads.
        carried: keys without effect on the computation; `to_hf` writes them unchanged.
        read: function (config.json without nulls except those of `nulls`, options so far) ->
            options to add or replace.
        write: function `DecoderConfig` -> keys to add or replace.
        nulls: keys whose null differs in meaning from their absence; nulls of them are kept.
        kinds: kinds of values of keys that only this family has, see `key_kinds`.
        inner_sizes: required keys that may be absent from a multimodal model's `text_config` -> the
            value that transformers then uses.
    """

    model_type: str
    architecture: str
    sizes: Mapping[str, str] = field(default_factory=lambda: SIZES)
    options: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    activation: tuple[str, str] = ("hidden_act", "silu")
    rope_theta: float | None = 10000.0
    rotary_fraction: tuple[str, float] | None = None
    rope_original: int | None = None
    rope_names: Mapping[str, str] = field(default_factory=dict)
    rotary_theta: str = "rope_theta"
    also_read: frozenset[str] = frozenset()
    carried: frozenset[str] = frozenset()
    read: Callable[[Mapping[str, Any], dict[str, Any]], Mapping[str, Any]] | None = None
    write: Callable[[DecoderConfig], Mapping[str, Any]] | None = None
    nulls: frozenset[str] = frozenset()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    inner_sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def known_keys(self) -> frozenset[str]:
        """Every key of config.json that the family reads."""
        own = {*self.sizes, *self.options, *self.refused, self.activation[0], *self.also_read}
        own |= self.carried
        if self.rotary_fraction is not None:
            own.add(self.rotary_fraction[0])
        rope = _ROPE_KEYS | {self.rotary_theta} if self.rope_theta else frozenset()
        return frozenset(own) | _READ_BY_ALL | rope

    @property
    def keys(self) -> Mapping[str, str]:
        """Options whose key in config.json has another name: option -> key."""
        pairs = {**{key: name for key, (name, _) in self.options.items()}, **self.sizes}
        keys = {name: key for key, name in pairs.items() if name != key}
        if self.rotary_fraction is not None:
            keys["rotary_fraction"] = self.rotary_fraction[0]
        return keys

    def read_options(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `DecoderConfig` for a config.json.

        Raises:
            ConfigError: keys are missing, or ask for something that the decoder can't do.
        """
        where = f"config.json of a {data.get('model_type')!r} model"
        self._refuse(data, where)
        sizes = required(data, tuple(self.sizes), where)
        options = {self.sizes[key]: value for key, value in sizes.items()}
        for key, (option, default) in self.options.items():
            absent = key not in data if key in self.nulls else data.get(key) is None
            options[option] = default if absent else data[key]
        key, usual = self.activation
        said = usual if data.get(key) is None else data[key]
        options["hidden_act"] = activation_from_hf(said, where, key)
        options |= self.fixed
        options["model_type"] = self.model_type
        if self.rope_theta is not None:
            options["rope"] = rope_from_hf(
                self._with_theta(data, where),
                where,
                theta=self.rope_theta,
                fraction=self._fraction(data),
                original=self.rope_original,
                older_names=self.rope_names,
            )
        if self.read is not None:
            kept = {
                key: entry for key, entry in data.items() if entry is not None or key in self.nulls
            }
            options |= self.read(kept, options)
        given_back = self.refused.keys() | self.carried | DROPOUTS
        dropped = (self.known_keys - given_back) | _DROPPED | {"quantization_config"}
        extra = {
            key: value for key, value in data.items() if key not in dropped and value is not None
        }
        if said != activation_to_hf(options["hidden_act"], usual):
            extra[key] = said
        if self.rope_theta is not None:
            extra |= _inert_rope(data)
        return {**options, "hf_extra": extra}

    def write_config(self, config: DecoderConfig) -> dict[str, Any]:
        """Return the config.json of a decoder's options."""
        data = dict(config.hf_extra)
        data |= {key: getattr(config, option) for key, option in self.sizes.items()}
        data |= {key: getattr(config, option) for key, (option, _) in self.options.items()}
        key, usual = self.activation
        data[key] = activation_to_hf(config.hidden_act, data.get(key), usual)
        if self.rope_theta is not None:
            rope = RopeConfig() if config.rope is None else config.rope
            inert = data.get("rope_parameters", {})
            data |= rope_to_hf(rope)
            data["rope_parameters"] = {**inert, **data["rope_parameters"]}
            data[self.rotary_theta] = data.pop("rope_theta")
            if self.rotary_fraction is not None:
                data[self.rotary_fraction[0]] = rope.rotary_fraction
        data["model_type"] = self.model_type
        data["architectures"] = [self.architecture]
        if self.write is not None:
            data |= self.write(config)
        return data

    def _fraction(self, data: Mapping[str, Any]) -> tuple[str, float] | None:
        """Return the key of the rotated share of a head and its default; None without such a key.

        The default is 1.0 if the key is null and null has a meaning.
        """
        if self.rotary_fraction is None:
            return None
        key, usual = self.rotary_fraction
        return key, 1.0 if key in self.nulls and key in data and data[key] is None else usual

    def _with_theta(self, data: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """Return config.json with the base of the rotary positions under the key `rope_theta`.

        Raises:
            ConfigError: several keys have different bases.
        """
        key = self.rotary_theta
        if key == "rope_theta":
            return data
        nested = data.get("rope_parameters")
        inner = nested.get("rope_theta") if isinstance(nested, Mapping) else None
        # transformers reads only this family's own key, and ignores `rope_theta`.
        meant = next(
            theta for theta in (data.get(key), inner, self.rope_theta) if theta is not None
        )
        said = {"rope_theta": data.get("rope_theta"), "rope_theta of rope_parameters": inner}
        others = [f"{name}={theta!r}" for name, theta in said.items() if theta not in (None, meant)]
        if others:
            raise ConfigError(
                path=where,
                expected=f"one base of the rotary positions, {key}",
                found=f"{', '.join(others)}, where {key} is {data.get(key, 'not there')!r}",
                next_step="correct one of them",
            )
        return {**data, "rope_theta": meant}

    def _refuse(self, data: Mapping[str, Any], where: str) -> None:
        dropouts = [f"{key}={data[key]!r}" for key in sorted(DROPOUTS) if data.get(key)]
        if dropouts:
            warnings.warn(
                f"{where}: {', '.join(dropouts)}: the decoder has none of it; what it computes is "
                "the same, training is not",
                stacklevel=4,
            )
        rules = {**self.refused, "quantization_config": Refused((None,), "dequantize them first")}
        refused = [
            f"{key}={data[key]!r} ({rule.why})"
            for key, rule in rules.items()
            if key in data and data[key] not in rule.allowed
        ]
        refused += wrong_kinds(data, self.known_keys, self.kinds)
        refused += refused_keys(data, self.known_keys, self.architecture)
        if refused:
            raise ConfigError(
                path=where,
                expected=f"a plain {self.model_type}",
                found="; ".join(refused),
                next_step="pass config_kwargs to override keys, if the weights allow it (None for "
                "no such key); what the architecture is, config_kwargs can't change",
            )


def _inert_rope(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the rotary scaling that change no number, which `to_hf` writes back."""
    nested = (data.get(key) for key in ("rope_scaling", "rope_parameters"))
    found = {key: rope[key] for rope in nested if rope for key in INERT_ROPE_KEYS & rope.keys()}
    return {"rope_parameters": found} if found else {}
