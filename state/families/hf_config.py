"""Pieces of Hugging Face's config.json that families share. JAX-free."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from cairn.state.config import RopeConfig, unread_keys
from cairn.state.errors import ConfigError

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_ACTIVATION_NAMES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
}
_ROPE_KEYS = frozenset(
    {
        *("factor", "high_freq_factor", "low_freq_factor", "original_max_position_embeddings"),
        *("partial_rotary_factor", "rope_theta", "rope_type", "type"),
    }
)
_LLAMA3_KEYS = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def required(data: Mapping[str, Any], keys: Sequence[str], where: str) -> dict[str, Any]:
    """These keys of a config.

    Raises:
        ConfigError: some are absent; all of them are named.
    """
    missing = [key for key in keys if data.get(key) is None]
    if missing:
        raise ConfigError(
            path=where,
            expected=f"the keys {', '.join(keys)}",
            found=f"no {', '.join(missing)}",
            next_step="complete the file, or take it again from its source",
        )
    return {key: data[key] for key in keys}


def refused_keys(data: Mapping[str, Any], known: Set[str], architecture: str) -> list[str]:
    """What a config.json says that a family does not read; each with its value and the reason.

    Args:
        data: the file's content.
        known: the keys that the family reads.
        architecture: the class that the family stands for.
    """
    named = data.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list | tuple) else [str(named)]
    refused = []
    if named and architecture.lower() not in [name.lower() for name in names]:
        refused.append(f"architectures={named!r} (only {architecture} is read so)")
    for key, value in sorted(unread_keys(data, known).items()):
        why = "code of the model's own is never run" if key == "auto_map" else "nothing reads it"
        refused.append(f"{key}={value!r} ({why})")
    return refused


def activation_from_hf(name: Any, where: str) -> str:
    """Our name of an activation.

    Raises:
        ConfigError: unknown; the known ones are listed.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(
            path=where,
            expected=f"hidden_act to be one of {', '.join(_ACTIVATIONS)}",
            found=repr(name),
            next_step="no other activation is built in",
        )
    return _ACTIVATIONS[name]


def activation_to_hf(name: str) -> str:
    """Hugging Face's name of one of our activations."""
    return _ACTIVATION_NAMES[name]


def rope_from_hf(data: Mapping[str, Any], where: str) -> RopeConfig:
    """Rotary positions from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`.

    Raises:
        ConfigError: a scaling that the decoder does not have, or one that lacks values; or these
            keys contradict each other.
    """
    scaling = _one_rope(data, where)
    theta = scaling.get("rope_theta")
    kind = scaling.get("rope_type", "default")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        kind = f"{kind} with partial_rotary_factor={scaling['partial_rotary_factor']}"
    unknown = {key: one for key, one in scaling.items() if key not in _ROPE_KEYS}
    if any(one is not None for one in unknown.values()):
        kind = f"{kind} with {', '.join(f'{key}={one!r}' for key, one in unknown.items())}"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(
            path=where,
            expected="rope_type default, linear or llama3",
            found=repr(kind),
            next_step="this way of scaling rotary positions is not built in",
        )
    options: dict[str, Any] = {"scaling": kind}
    if theta is not None:
        options["theta"] = float(theta)
    if kind != "default":
        options["factor"] = float(required(scaling, ("factor",), f"{where}: rope")["factor"])
    if kind == "llama3":
        fallback = {"original_max_position_embeddings": data.get("max_position_embeddings")}
        options |= required({**fallback, **scaling}, _LLAMA3_KEYS, f"{where}: rope")
    return RopeConfig(**options)


def _one_rope(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What all keys together say of rotary positions, its `type` as `rope_type`.

    Which of two that differ counts depends on the version of transformers.

    Raises:
        ConfigError: two differ, or one is no object, or holds text where a number belongs.
    """
    said: dict[str, dict[str, Any]] = {"rope_theta": {"rope_theta": data.get("rope_theta")}}
    wrong = []
    for key in ("rope_scaling", "rope_parameters"):
        found = data.get(key)
        if found is not None and not isinstance(found, Mapping):
            wrong.append(f"{key}={found!r}, no object")
            continue
        said[key] = dict(found or {})
        older = said[key].pop("type", None)
        if older is not None and said[key].setdefault("rope_type", older) != older:
            wrong.append(f"type={older!r} and rope_type={said[key]['rope_type']!r} in {key}")
    merged: dict[str, tuple[str, Any]] = {}
    for key, values in said.items():
        for name, value in values.items():
            if value is None:
                continue
            if name != "rope_type" and name in _ROPE_KEYS and not _is_number(value):
                wrong.append(f"{name}={value!r} in {key}, no number")
            first, other = merged.setdefault(name, (key, value))
            if other != value:
                wrong.append(f"{name}={other!r} in {first}, and {value!r} in {key}")
    if wrong:
        raise ConfigError(
            path=f"{where}: rope",
            expected="rope_theta, rope_scaling and rope_parameters that agree",
            found="; ".join(wrong),
            next_step="correct them, or override all: config_kwargs with rope_parameters, and None "
            "for the other two",
        )
    return {name: value for name, (_, value) in merged.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """The keys that transformers 5 reads, and those that transformers 4 reads."""
    parameters: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.scaling != "default":
        parameters["factor"] = rope.factor
    if rope.scaling == "llama3":
        parameters |= {key: getattr(rope, key) for key in _LLAMA3_KEYS}
    data: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": rope.theta}
    if rope.scaling != "default":
        data["rope_scaling"] = {k: v for k, v in parameters.items() if k != "rope_theta"}
    return data
