"""Rotary positions in a GGUF file's metadata and tensors.

Source: llama.cpp's converter, and the defaults of its `llama_model::load_hparams`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cairn.interop.config.frequencies import attention_factor, inverse_frequencies, llama3_divisors
from cairn.interop.config.rope import RopeConfig
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.errors import ConfigError
from cairn.interop.families.hf_config import required, rope_parameters

__all__ = ["ROPE_KEYS", "rope_from_gguf", "rope_to_gguf"]

_TYPE, _FACTOR = "rope.scaling.type", "rope.scaling.factor"
_ORIGINAL = "rope.scaling.original_context_length"
_ATTENTION = "rope.scaling.attn_factor"
_YARN = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
_DIVISORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

ROPE_KEYS = frozenset({"rope.freq_base", _TYPE, _FACTOR, _ORIGINAL, _ATTENTION, *_YARN})
"""Metadata keys that `rope_from_gguf` reads."""


def rope_from_gguf(
    metadata: Mapping[str, Any],
    read: Callable[[str], Array],
    shapes: Mapping[str, Shape],
    where: str,
) -> dict[str, Any]:
    """Return `rope_parameters` of config.json, without `partial_rotary_factor`.

    Args:
        metadata: the architecture's metadata, by keys without the architecture's prefix.
        read: returns the tensor of a name.
        shapes: shape of each tensor in the file, by name.
        where: the file, for messages.

    Raises:
        ConfigError: the scaling is unknown, or lacks values.
    """
    theta = float(metadata.get("rope.freq_base", 10000.0))
    kind = metadata.get(_TYPE, "linear" if _FACTOR in metadata else "none")
    if kind == "none" and _LONG in shapes:
        kind = "longrope"  # the converter writes no type for it
    refused = [f"{_TYPE}={kind!r}"] if kind not in ("none", "linear", "yarn", "longrope") else []
    if kind != "longrope" and metadata.get(_ATTENTION, 1.0) != 1.0:
        refused.append(f"{_ATTENTION}={metadata[_ATTENTION]!r}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": float(metadata.get(_FACTOR, 1.0))}
    elif kind == "yarn" and not refused:
        scaling = required(metadata, (_FACTOR, _ORIGINAL), where)
        rope |= {"rope_type": "yarn", "factor": float(scaling[_FACTOR])}
        rope |= {"original_max_position_embeddings": scaling[_ORIGINAL]}
        rope |= {name: float(metadata[key]) for key, name in _YARN.items() if key in metadata}
    elif kind == "longrope":
        rope |= _longrope(metadata, read, shapes, where)
    if _DIVISORS in shapes:
        llama3 = _llama3(read(_DIVISORS), theta) if rope["rope_type"] == "default" else None
        if llama3 is None:
            refused.append(f"{_DIVISORS} (not Llama 3's)")
        else:
            rope = rope_parameters(llama3)
    if refused:
        raise ConfigError(
            path=where,
            expected="a scaling of rotary positions that is built in",
            found="; ".join(refused),
            next_step="use the model's safetensors instead",
        )
    return rope


def rope_to_gguf(rope: RopeConfig, head_dim: int) -> tuple[dict[str, Any], dict[str, Array]]:
    """Return the metadata and tensors of a file that describe rotary positions.

    Settings that no file can hold are left out. The caller must read the result again to notice.

    Args:
        rope: the rotary positions.
        head_dim: number of a head's dimensions to which `rotary_fraction` refers.
    """
    metadata: dict[str, Any] = {
        "rope.freq_base": float(rope.theta),
        "rope.dimension_count": rope.rotary_dim(head_dim),
    }
    tensors: dict[str, Array] = {}
    if rope.original_max_position_embeddings is not None and rope.scaling in ("yarn", "longrope"):
        metadata[_ORIGINAL] = rope.original_max_position_embeddings
    if rope.scaling in ("linear", "yarn"):
        metadata |= {_TYPE: rope.scaling, _FACTOR: float(rope.factor)}
    if rope.scaling == "yarn":
        said = {key: getattr(rope, name) for key, name in _YARN.items()}
        metadata |= {key: float(value) for key, value in said.items() if value is not None}
    if rope.scaling == "longrope":
        metadata[_TYPE] = rope.scaling  # without it the factors are loaded for Phi-3 alone
        metadata[_ATTENTION] = attention_factor(rope)  # its default is 1
        both = {_LONG: rope.long_factor, _SHORT: rope.short_factor}
        tensors = {name: np.asarray(factors, np.float32) for name, factors in both.items()}
    if rope.scaling == "llama3":
        turning = rope.rotary_dim(head_dim)
        kept = inverse_frequencies(RopeConfig(theta=rope.theta), turning)
        tensors = {_DIVISORS: np.asarray(llama3_divisors(rope, kept), np.float32)}
    return metadata, tensors


def _longrope(
    metadata: Mapping[str, Any],
    read: Callable[[str], Array],
    shapes: Mapping[str, Shape],
    where: str,
) -> dict[str, Any]:
    there = {name: name for name in (_LONG, _SHORT) if name in shapes}
    required(there, (_LONG, _SHORT), where)
    lengths = required(metadata, ("context_length", _ORIGINAL), where)
    rope = {
        "rope_type": "longrope",
        "factor": lengths["context_length"] / lengths[_ORIGINAL],
        "original_max_position_embeddings": lengths[_ORIGINAL],
        "long_factor": [float(factor) for factor in read(_LONG)],
        "short_factor": [float(factor) for factor in read(_SHORT)],
    }
    if _ATTENTION in metadata:
        rope["attention_factor"] = float(metadata[_ATTENTION])
    return rope


def _llama3(divisors: Array, theta: float) -> RopeConfig | None:
    """Return Llama 3's scaling with these divisors of the frequencies; None if they are not its.

    Only `factor` differs between those models; it is the divisor of the longest wavelength.
    """
    rope = RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    kept = inverse_frequencies(RopeConfig(theta=theta), 2 * divisors.size)
    same = np.allclose(llama3_divisors(rope, kept), divisors, rtol=1e-4)
    return rope if same else None
