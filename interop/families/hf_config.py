"""Readers and writers of parts of Hugging Face's config.json that families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from cairn.interop.config.hf_keys import NEUTRAL_VALUES, unread_keys
from cairn.interop.config.rope import RopeConfig
from cairn.interop.errors import ConfigError
from cairn.interop.families.key_kinds import is_number

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_ACTIVATION_NAMES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "relu": "relu",
    "clamped_silu": "silu",
}
_ORIGINAL = "original_max_position_embeddings"
_KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), ()),
    "yarn": (
        ("factor", _ORIGINAL),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (("factor", "short_factor", "long_factor", _ORIGINAL), ("attention_factor",)),
}
"""Rotary scaling -> its required keys, and its optional keys."""
_NUMBERS = frozenset(
    {
        *("factor", "high_freq_factor", "low_freq_factor", _ORIGINAL, "partial_rotary_factor"),
        *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "rope_theta"),
    }
)
_POSITIVE = frozenset({"partial_rotary_factor", "rope_theta", _ORIGINAL})
_IDLE = frozenset({"factor", "high_freq_factor", "low_freq_factor", _ORIGINAL})
"""Keys that files may have without effect, beside a scaling that does not use them."""
INERT_ROPE_KEYS = frozenset({"finetuned", "mrope_interleaved", "mrope_section"})
"""Keys beside a scaling that change no number for text.

They say how the model was trained, and how the positions of images and videos are computed.
"""


def required(data: Mapping[str, Any], keys: Sequence[str], where: str) -> dict[str, Any]:
    """Return the entries of `data` with these keys.

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


def refused_keys(data: Mapping[str, Any], read: Set[str], architecture: str) -> list[str]:
    """Return a line for each key that a family does not read and that may matter, with the reason.

    Args:
        data: the file's content.
        read: the keys that the family reads.
        architecture: name of the family's class in transformers.
    """
    named = data.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list | tuple) else [str(named)]
    refused = []
    if named and architecture.lower() not in [name.lower() for name in names]:
        refused.append(f"architectures={named!r} (only {architecture} is read so)")
    for key, value in sorted(unread_keys(data, read).items()):
        why = "nothing reads it"
        if key == "auto_map":
            why = "code of the model's own is never run"
        elif key in NEUTRAL_VALUES:
            why = f"nothing reads it, and it changes {NEUTRAL_VALUES[key][1]}"
        refused.append(f"{key}={value!r} ({why})")
    return refused


def activation_from_hf(name: Any, where: str, key: str = "hidden_act") -> str:
    """Return our name of the activation that Hugging Face calls `name`.

    Raises:
        ConfigError: the activation is unknown; the known ones are listed.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(
            path=where,
            expected=f"{key} to be one of {', '.join(_ACTIVATIONS)}",
            found=repr(name),
            next_step="no other activation is built in",
        )
    return _ACTIVATIONS[name]


def activation_to_hf(name: str, *preferred: Any) -> str:
    """Return Hugging Face's name of one of our activations.

    Args:
        name: our name.
        *preferred: names of Hugging Face; the first one with the same meaning is returned.
    """
    same = (candidate for candidate in preferred if _ACTIVATIONS.get(candidate) == name)
    return next(same, _ACTIVATION_NAMES[name])


def rope_from_hf(
    data: Mapping[str, Any],
    where: str,
    *,
    theta: float = 10000.0,
    fraction: tuple[str, float] | None = None,
    original: int | None = None,
    older_names: Mapping[str, str] = MappingProxyType({}),
) -> RopeConfig:
    """Return the rotary positions of `rope_parameters`, or of `rope_theta` and `rope_scaling`.

    Args:
        data: the file's content.
        where: the file, for messages.
        theta: base of the frequencies if no key has it.
        fraction: key of the rotated share of each head, and its default; None: whole heads are
            rotated.
        original: context length of pretraining if the model has no key of its own for it; a
            scaling that needs one must not have another. None: the scaling's, or
            `max_position_embeddings`.
        older_names: older names of scalings -> today's names.

    Raises:
        ConfigError: the scaling is unknown or lacks values, or keys contradict each other.
    """
    scaling = _one_rope(data, where, older_names)
    kind = scaling.pop("rope_type", "default")
    options: dict[str, Any] = {"theta": float(scaling.pop("rope_theta", theta))}
    share = scaling.pop("partial_rotary_factor", None)
    key, usual = fraction or ("partial_rotary_factor", 1.0)
    said = data.get(key) if fraction is not None else None
    if share is not None and said is not None and share != said:
        raise ConfigError(
            path=f"{where}: rope",
            expected="one share of each head that turns",
            found=f"{key}={said!r}, and partial_rotary_factor={share!r} in rope_parameters",
            next_step="correct one of them",
        )
    share = next((setting for setting in (share, said, usual) if setting is not None), 1.0)
    description = repr(kind)
    if fraction is None and share != 1.0:
        description = f"{kind} with partial_rotary_factor={share}"
    elif isinstance(kind, str) and kind in _KINDS:
        meant = {*_KINDS[kind][0], *_KINDS[kind][1]} | _IDLE | INERT_ROPE_KEYS
        unknown = {name: setting for name, setting in scaling.items() if name not in meant}
        if unknown:
            listed = ", ".join(f"{name}={setting!r}" for name, setting in unknown.items())
            description = f"{kind} with {listed}"
    if description != repr(kind) or not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigError(
            path=where,
            expected=f"rope_type {', '.join(_KINDS)}",
            found=description if description != repr(kind) else repr(kind),
            next_step="this way of scaling rotary positions is not built in",
        )
    needed, possible = _KINDS[kind]
    longest = data.get("max_position_embeddings")
    outer = original if data.get(_ORIGINAL) is None else data[_ORIGINAL]
    settings = {_ORIGINAL: longest if outer is None else outer, **scaling}
    if _ORIGINAL in needed and outer is not None and settings[_ORIGINAL] != outer:
        raise ConfigError(
            path=f"{where}: rope",
            expected=f"one {_ORIGINAL}",
            found=f"{outer!r}, and {settings[_ORIGINAL]!r} beside rope_type {kind!r}"
            if data.get(_ORIGINAL) is not None
            else f"{settings[_ORIGINAL]!r} beside rope_type {kind!r} alone, where transformers "
            f"takes {outer!r}",
            next_step=f"correct one of them: {_ORIGINAL} of the model itself counts",
        )
    # transformers computes YaRN's factor only if the file has "factor": null.
    may_follow = kind == "longrope" or (kind == "yarn" and _is_null("factor", data))
    if may_follow and settings.get("factor") is None and longest and settings[_ORIGINAL]:
        settings["factor"] = longest / settings[_ORIGINAL]
    options |= required(settings, needed, f"{where}: rope")
    options |= {name: settings[name] for name in possible if settings.get(name) is not None}
    if "factor" in options:
        options["factor"] = float(options["factor"])
    if _ORIGINAL in options and options[_ORIGINAL] == int(options[_ORIGINAL]):
        options[_ORIGINAL] = int(options[_ORIGINAL])
    for name in ("short_factor", "long_factor"):
        if name in options:
            options[name] = tuple(float(setting) for setting in options[name])
    if kind == "dynamic":
        options[_ORIGINAL] = longest
    return RopeConfig(scaling=kind, rotary_fraction=float(share), **options)


def _one_rope(
    data: Mapping[str, Any], where: str, older_names: Mapping[str, str]
) -> dict[str, Any]:
    """Return the rotary settings of all keys, merged; `type` becomes `rope_type`.

    If keys differed, their meaning would depend on the version of transformers.

    Raises:
        ConfigError: two keys differ, or one is no object or has text in place of a number.
    """
    said: dict[str, dict[str, Any]] = {"rope_theta": {"rope_theta": data.get("rope_theta")}}
    wrong = []
    for key in ("rope_scaling", "rope_parameters"):
        nested = data.get(key)
        if nested is not None and not isinstance(nested, Mapping):
            wrong.append(f"{key}={nested!r}, no object")
            continue
        said[key] = {
            name: older_names.get(value, value) if isinstance(value, str) else value
            for name, value in (nested or {}).items()
        }
        older = said[key].pop("type", None)
        if older is not None and said[key].setdefault("rope_type", older) != older:
            wrong.append(f"type={older!r} and rope_type={said[key]['rope_type']!r} in {key}")
    merged: dict[str, tuple[str, Any]] = {}
    for key, values in said.items():
        for name, value in values.items():
            if value is None and name != "truncate":  # null counts as False there
                continue
            wrong += _wrong_kind(name, value, key)
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


def _wrong_kind(name: str, value: Any, key: str) -> list[str]:
    if name in ("short_factor", "long_factor"):
        numbers = value if isinstance(value, list | tuple) else [None]
        return [] if all(map(is_number, numbers)) else [f"{name}={value!r} in {key}, no numbers"]
    if name == "truncate":
        return [] if isinstance(value, bool) else [f"{name}={value!r} in {key}, not true or false"]
    if name not in _NUMBERS:
        return []
    if not is_number(value):
        return [f"{name}={value!r} in {key}, no number"]
    return [f"{name}={value!r} in {key}, not above 0"] if name in _POSITIVE and value <= 0 else []


def _is_null(name: str, data: Mapping[str, Any]) -> bool:
    """Return whether the rotary settings have this key with the value null."""
    said = (data.get(key) for key in ("rope_scaling", "rope_parameters"))
    return any(
        isinstance(nested, Mapping) and name in nested and nested[name] is None for nested in said
    )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    """Return the rotary keys of transformers 5, and those of transformers 4."""
    parameters = rope_parameters(rope)
    data: dict[str, Any] = {"rope_parameters": parameters, "rope_theta": rope.theta}
    if rope.scaling != "default":
        apart = ("rope_theta", "partial_rotary_factor")
        data["rope_scaling"] = {k: v for k, v in parameters.items() if k not in apart}
    return data


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """Return `rope_parameters` of transformers 5, or its entry for one kind of layers."""
    needed, possible = _KINDS[rope.scaling]
    usual = RopeConfig()
    parameters: dict[str, Any] = {"rope_type": rope.scaling, "rope_theta": rope.theta}
    if rope.rotary_fraction != 1.0:
        parameters["partial_rotary_factor"] = rope.rotary_fraction
    for name in (*needed, *possible):
        value = getattr(rope, name)
        if name in needed or value != getattr(usual, name):
            parameters[name] = list(value) if isinstance(value, tuple) else value
    return parameters
