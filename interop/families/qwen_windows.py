"""Windowed layers of Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.families.config_form import windows_from_hf

__all__ = ["QWEN_WINDOW_KEYS", "read_windows", "write_windows"]

QWEN_WINDOW_KEYS = frozenset(
    {"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"}
)


def read_windows(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for windows: if used, layers from `max_window_layers` on have one."""
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
    first = data.get("max_window_layers", 28)
    layers = windows_from_hf(data, options, lambda layer: window is not None and layer >= first)
    return layers | {"sliding_window": window}


def write_windows(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of config.json that describe the window."""
    numbers = range(config.num_hidden_layers)
    windowed = [number for number in numbers if config.has_window(number)]
    return {
        "layer_types": None if config.layer_types is None else list(config.layer_types),
        "max_window_layers": windowed[0] if windowed else config.num_hidden_layers,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }
