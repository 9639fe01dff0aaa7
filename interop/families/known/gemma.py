"""Gemma: embeddings scaled by the square root of their width, norms times 1 + scale.

Source: transformers `GemmaConfig`, `GemmaForCausalLM`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm
from cairn.interop.families.gguf_names import NORMS_PLUS_ONE, gguf_names
from cairn.interop.families.names import Names


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "attention_out_bias": options["attention_bias"],
        "embedding_scale": math.sqrt(options["hidden_size"]),
    }
    if data.get("hidden_act") == "gelu":  # in the first files, which mean "gelu_tanh"
        changes["hidden_act"] = "gelu_tanh"
    return changes


FAMILY = Family(
    ConfigForm(
        "gemma",
        "GemmaForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            head_dim=("head_dim", 256),
            num_key_value_heads=("num_key_value_heads", 16),
            tie_word_embeddings=("tie_word_embeddings", True),
        ),
        fixed={"norm": "rms_offset"},
        refused={
            "hidden_activation": Refused((None, "gelu_pytorch_tanh"), "no other was trained"),
            "use_bidirectional_attention": Refused((None, False), "attention is causal"),
        },
        activation=("hidden_act", "gelu_pytorch_tanh"),
        read=_read,
        nulls=frozenset({"num_key_value_heads"}),
    ),
    Names(),
    GGUFForm(
        "gemma",
        gguf_names(ops=NORMS_PLUS_ONE),
        engine=Engine({"tie_word_embeddings": (True,)}, wide_heads=True),
    ),
)
