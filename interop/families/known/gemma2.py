"""Gemma 2: windows in every other layer, norms before and after attention and MLP, soft caps.

Source: transformers `Gemma2Config`, `Gemma2ForCausalLM`; arXiv 2408.00118.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options, windows_from_hf
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm
from cairn.interop.families.gguf_names import NORMS_PLUS_ONE, gguf_names
from cairn.interop.families.names import SANDWICH, Names


def _write(config: DecoderConfig) -> dict[str, Any]:
    scale = config.attention_scale or config.head_size**-0.5
    types = None if config.layer_types is None else list(config.layer_types)
    return {
        "layer_types": types,
        "query_pre_attn_scalar": max(1, round(scale**-2)),
    }


def _read_gguf(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the key for the scale of queries, which files lack; the 27B model has another one."""
    whole = data["num_hidden_layers"] != 46
    each = data["hidden_size"] // data["num_attention_heads"]
    return {"query_pre_attn_scalar": data["head_dim"] if whole else each}


FAMILY = Family(
    ConfigForm(
        "gemma2",
        "Gemma2ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            attn_logit_softcapping=("attention_soft_cap", 50.0),
            final_logit_softcapping=("logit_soft_cap", 30.0),
            head_dim=("head_dim", 256),
            num_key_value_heads=("num_key_value_heads", 4),
            sliding_window=("sliding_window", 4096),
            tie_word_embeddings=("tie_word_embeddings", True),
        ),
        fixed={"norm": "rms_offset", "block": "sandwich"},
        refused={
            "cache_implementation": Refused(("hybrid", None), "caches are the decoder's own"),
            "use_bidirectional_attention": Refused((None, False), "attention is causal"),
        },
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        also_read=frozenset({"layer_types", "query_pre_attn_scalar"}),
        carried=frozenset({"hidden_act", "sliding_window_size"}),
        read=lambda data, options: {
            **windows_from_hf(data, options, lambda layer: layer % 2 == 0),
            "attention_out_bias": options["attention_bias"],
            "attention_scale": float(data.get("query_pre_attn_scalar", 256)) ** -0.5,
            "embedding_scale": math.sqrt(options["hidden_size"]),
        },
        write=_write,
        nulls=frozenset({"attn_logit_softcapping", "final_logit_softcapping"}),
    ),
    Names(layer_names=SANDWICH),
    GGUFForm(
        "gemma2",
        gguf_names(ops=NORMS_PLUS_ONE),
        options={
            "attention.sliding_window": "sliding_window",
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        only={"attention.sliding_window_pattern": (2,)},
        read=_read_gguf,
        engine=Engine({"tie_word_embeddings": (True,)}, windows=True, wide_heads=True),
    ),
)
