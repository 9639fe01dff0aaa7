"""Granite 3: Llama with multipliers of embeddings, attention, residual stream and logits.

Source: transformers `GraniteConfig`, `GraniteForCausalLM`.
"""

from __future__ import annotations

from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import LLAMA_ENGINE
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import ROTARY_PAIRS, gguf_names
from cairn.interop.families.names import Names


def _write(config: DecoderConfig) -> dict[str, Any]:
    exact = 1.0 / config.logit_scale
    whole = float(round(exact))
    return {"logits_scaling": whole if whole and 1.0 / whole == config.logit_scale else exact}


FAMILY = Family(
    ConfigForm(
        "granite",
        "GraniteForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            attention_multiplier=("attention_scale", 1.0),
            embedding_multiplier=("embedding_scale", 1.0),
            mlp_bias=("mlp_bias", False),
            residual_multiplier=("residual_scale", 1.0),
        ),
        also_read=frozenset({"logits_scaling"}),
        read=lambda data, options: {
            "attention_out_bias": options["attention_bias"],
            "logit_scale": 1.0 / data.get("logits_scaling", 1.0),
        },
        write=_write,
    ),
    Names(),
    GGUFForm(
        "granite",
        gguf_names(ops=ROTARY_PAIRS),
        sizes={
            **gguf_sizes(),
            "attention.scale": "attention_multiplier",
            "logit_scale": "logits_scaling",
        },
        options={
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
        },
        flags={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"},
        only={"rope.scaling.finetuned": (True,)},  # here: has rotary positions
        engine=LLAMA_ENGINE,
    ),
)
