"""OLMo 3: OLMo 2 with a window in three of four layers.

For long texts only the rotary positions of layers without a window are scaled.

Source: transformers `Olmo3Config`, `Olmo3ForCausalLM`; llama.cpp's `olmo2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import FULL, WINDOW
from cairn.interop.errors import ConfigError
from cairn.interop.families.config_form import ConfigForm, usual_options, windows_from_hf
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import (
    GGUF_WINDOW_BASE,
    GGUFContent,
    GGUFForm,
    gguf_window_layers,
    gguf_windows,
)
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.layer_ropes import ropes_by_layer, written_ropes
from cairn.interop.families.names import SANDWICH, Names

_THETA, _PATTERN = 5e5, 4


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    where = f"config.json of a {data['model_type']!r} model"
    kinds = data.get("rope_parameters")
    if kinds == {}:
        raise ConfigError(
            path=f"{where}: rope_parameters",
            expected=f"an entry for each kind of layers, {FULL} and {WINDOW}",
            found="{}, which transformers does not read",
            next_step="leave it out",
        )
    rope, local = ropes_by_layer(data, where, theta=_THETA, window_theta=_THETA)
    said = kinds is not None and "rope_theta" in kinds.get(WINDOW, {})
    if rope.theta != local.theta and not said:
        raise ConfigError(
            path=f"{where}: rope_theta",
            expected=f"{_THETA:g}, or a rope_theta for each kind of layers in rope_parameters",
            found=f"{rope.theta:g}, which transformers takes for layers without a window alone",
            next_step="say both: config_kwargs with rope_parameters",
        )
    return windows_from_hf(data, options, lambda layer: bool((layer + 1) % _PATTERN)) | {
        "attention_out_bias": options["attention_bias"],
        "rope": rope,
        "window_rope": local,
    }


def _read_gguf(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a GGUF file's windows and rotary keys; only layers without a window are scaled."""
    rope = data["rope_parameters"]
    base = content.metadata.get(GGUF_WINDOW_BASE, rope["rope_theta"])
    return {
        "layer_types": gguf_window_layers(content, data["num_hidden_layers"], _PATTERN),
        "rope_parameters": {
            FULL: rope,
            WINDOW: {"rope_type": "default", "rope_theta": base},
        },
    }


FAMILY = Family(
    ConfigForm(
        "olmo3",
        "Olmo3ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            rms_norm_eps=("rms_norm_eps", 1e-5),
            sliding_window=("sliding_window", 4096),
        ),
        fixed={"block": "post", "qk_norm": "whole"},
        rope_theta=None,
        also_read=frozenset({"layer_types", "rope_parameters", "rope_scaling", "rope_theta"}),
        read=_read,
        write=lambda config: {
            "layer_types": None if config.layer_types is None else list(config.layer_types),
            "rope_parameters": written_ropes(config),
        },
    ),
    Names(layer_names=SANDWICH),
    GGUFForm(
        "olmo2",
        gguf_names(),
        options={"attention.sliding_window": "sliding_window"},
        also_read=frozenset({"attention.sliding_window_pattern", GGUF_WINDOW_BASE}),
        flags={"attention_bias": "blk.0.attn_q.bias"},
        read=_read_gguf,
        write=gguf_windows,
        fits=lambda content: bool(content.metadata.get("attention.sliding_window")),
        engine=Engine({"attention_bias": (False,)}, needs_head=True, windows=True),
    ),
)
