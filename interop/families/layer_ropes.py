"""Rotary positions of families whose windowed layers have rotary positions of their own (Gemma 3).

Source: transformers `Gemma3TextConfig.convert_rope_params_to_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import FULL, WINDOW, DecoderConfig
from cairn.interop.config.rope import RopeConfig
from cairn.interop.errors import ConfigError
from cairn.interop.families.hf_config import rope_from_hf, rope_parameters

__all__ = ["ropes_by_layer", "written_ropes"]


def ropes_by_layer(
    data: Mapping[str, Any], where: str, *, theta: float, window_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotary positions of layers without a window, and of those with one.

    Args:
        data: content of config.json.
        where: the file, for messages.
        theta: base of the frequencies of layers without a window, if no key has it.
        window_theta: base of the frequencies of layers with a window, if no key has it.

    Raises:
        ConfigError: the keys have a form that transformers does not read in such a family.
    """
    nested = data.get("rope_parameters", {})
    if nested != {} and not (isinstance(nested, Mapping) and {FULL, WINDOW} & nested.keys()):
        raise ConfigError(
            path=f"{where}: rope_parameters",
            expected=f"an entry for each kind of layers, {FULL} and {WINDOW}",
            found=f"{nested!r}, which transformers does not read",
            next_step=f"put it under {FULL}, or override it: config_kwargs with rope_parameters",
        )
    whole = _entry(nested.get(FULL), data.get("rope_theta"))
    local = _entry(nested.get(WINDOW), data.get("rope_local_base_freq"))
    scaling = data.get("rope_scaling")
    if isinstance(scaling, Mapping) and "type" in scaling and "rope_type" not in scaling:
        raise ConfigError(
            path=f"{where}: rope_scaling",
            expected="rope_type",
            found=f"type={scaling['type']!r}, by which transformers scales nothing in this family",
            next_step="call it rope_type, or override it: config_kwargs with rope_scaling",
        )
    rope = rope_from_hf(whole | {"rope_scaling": scaling}, where, theta=theta)
    if not rope.truncate:
        raise ConfigError(
            path=f"{where}: rope",
            expected="no truncate, which transformers does not read in this family",
            found="truncate=False",
            next_step="leave it out",
        )
    return rope, rope_from_hf(local, where, theta=window_theta)


def written_ropes(config: DecoderConfig) -> dict[str, dict[str, Any]]:
    """Return `rope_parameters` of config.json, with an entry for each kind of layers."""
    rope = config.rope or RopeConfig()
    local = config.window_rope or rope
    return {FULL: rope_parameters(rope), WINDOW: rope_parameters(local)}


def _entry(entry: Any, theta: Any) -> dict[str, Any]:
    """Return the rotary settings of one kind of layers; transformers 4 wrote `theta` apart."""
    said = isinstance(entry, Mapping) and "rope_theta" in entry
    return {"rope_parameters": entry, "rope_theta": None if said else theta}
