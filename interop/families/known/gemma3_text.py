"""Gemma 3's text model: five of six layers have a window and rotary positions of their own.

Source: transformers `Gemma3TextConfig`, `Gemma3ForCausalLM`; arXiv 2503.19786.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import FULL, WINDOW, DecoderConfig
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options, windows_from_hf
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import (
    GGUF_WINDOW_BASE,
    GGUFContent,
    GGUFForm,
    gguf_sizes,
    gguf_window_layers,
    gguf_windows,
)
from cairn.interop.families.gguf_names import NORMS_PLUS_ONE, gguf_names
from cairn.interop.families.layer_ropes import ropes_by_layer, written_ropes
from cairn.interop.families.names import SANDWICH, Names

_THETA, _WINDOW_THETA, _PATTERN = 1e6, 1e4, 6


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    where = f"config.json of a {data['model_type']!r} model"
    pattern = data.get("sliding_window_pattern") or data.get("_sliding_window_pattern") or _PATTERN
    rope, local = ropes_by_layer(data, where, theta=_THETA, window_theta=_WINDOW_THETA)
    return windows_from_hf(data, options, lambda layer: bool((layer + 1) % pattern)) | {
        "attention_out_bias": options["attention_bias"],
        "attention_scale": float(data.get("query_pre_attn_scalar", 256)) ** -0.5,
        "embedding_scale": math.sqrt(options["hidden_size"]),
        "rope": rope,
        "window_rope": local,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    scale = config.attention_scale or config.head_size**-0.5
    ropes = written_ropes(config)
    types = None if config.layer_types is None else list(config.layer_types)
    return {
        "layer_types": types,
        "query_pre_attn_scalar": max(1, round(scale**-2)),
        "rope_local_base_freq": ropes[WINDOW]["rope_theta"],
        "rope_parameters": ropes,
        "rope_theta": ropes[FULL]["rope_theta"],
    }


def _read_gguf(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a GGUF file's windows, rotary keys, and scale of queries, which differs at 27B."""
    layers, local = data["num_hidden_layers"], content.metadata.get(GGUF_WINDOW_BASE)
    each = data["hidden_size"] // data["num_attention_heads"]
    windowed = gguf_window_layers(content, layers, _PATTERN)
    return {
        "layer_types": windowed if "sliding_window" in data else [FULL] * layers,
        "query_pre_attn_scalar": each if layers == 62 else data["head_dim"],
        "rope_parameters": {
            FULL: data["rope_parameters"],
            WINDOW: {"rope_type": "default", "rope_theta": local or _WINDOW_THETA},
        },
    }


FAMILY = Family(
    ConfigForm(
        "gemma3_text",
        "Gemma3ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            final_logit_softcapping=("logit_soft_cap", None),
            head_dim=("head_dim", 256),
            num_key_value_heads=("num_key_value_heads", 4),
            sliding_window=("sliding_window", 4096),
            tie_word_embeddings=("tie_word_embeddings", True),
        ),
        fixed={"norm": "rms_offset", "block": "sandwich", "qk_norm": "head"},
        refused={
            "attn_logit_softcapping": Refused((None,), "transformers reads it and caps nothing"),
            "cache_implementation": Refused(("hybrid", None), "caches are the decoder's own"),
            "use_bidirectional_attention": Refused((None, False), "attention is causal"),
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        rope_theta=None,
        also_read=frozenset(
            {
                *("layer_types", "query_pre_attn_scalar", "rope_local_base_freq"),
                *("rope_parameters", "rope_scaling", "rope_theta", "sliding_window_pattern"),
                "_sliding_window_pattern",
            }
        ),
        carried=frozenset({"hidden_act"}),
        read=_read,
        write=_write,
        inner_sizes={
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "num_hidden_layers": 26,
            "vocab_size": 262208,
        },
    ),
    Names(layer_names=SANDWICH),
    GGUFForm(
        "gemma3",
        gguf_names(ops=NORMS_PLUS_ONE),
        sizes={**gguf_sizes(), "rope.freq_base": "rope_theta"},
        options={
            "attention.sliding_window": "sliding_window",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        also_read=frozenset({"attention.sliding_window_pattern", GGUF_WINDOW_BASE}),
        read=_read_gguf,
        write=gguf_windows,
        engine=Engine(windows=True, window_bases=True, wide_heads=True),
    ),
)
