"""Command R and Aya 23: attention and MLP share a norm; neighbouring dimensions are rotated.

Source: transformers `CohereConfig`, `CohereForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.conversion.ops import TRANSPOSE, Chain, Op, RotaryRows
from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm, gguf_sizes, refuse_own_head
from cairn.interop.families.gguf_names import ROTARY_PAIRS, gguf_names
from cairn.interop.families.key_kinds import FLAG, NUMBER
from cairn.interop.families.names import Names

_NORMALISED_LAYERS = 64


def _scales(config: DecoderConfig, leaf: str) -> Op:
    """Return the operation for a norm's scales: one row per head, reordered for rotation."""
    return Chain((TRANSPOSE, RotaryRows(1), TRANSPOSE))


_PAIRS = {
    **ROTARY_PAIRS,
    "self_attn/q_norm": _scales,
    "self_attn/k_norm": _scales,
}


def _read_gguf(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of config.json for a GGUF file; heads are normalised from a number of layers on.

    llama.cpp decides by the number of layers too.
    """
    refuse_own_head(content, "command-r")
    return {
        "logit_scale": data.get("logit_scale") or 1.0,
        "use_qk_norm": data["num_hidden_layers"] >= _NORMALISED_LAYERS,
    }


FAMILY = Family(
    ConfigForm(
        "cohere",
        "CohereForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            layer_norm_eps=("rms_norm_eps", 1e-5),
            logit_scale=("logit_scale", 0.0625),
            rms_norm_eps=None,
            tie_word_embeddings=("tie_word_embeddings", True),
        ),
        fixed={"block": "parallel", "norm": "layer", "shared_norm": True},
        rope_theta=500000.0,
        also_read=frozenset({"use_qk_norm"}),
        read=lambda data, options: {
            "attention_out_bias": options["attention_bias"],
            "qk_norm": "each_head" if data.get("use_qk_norm") else None,
        },
        write=lambda config: {"use_qk_norm": config.qk_norm is not None},
        kinds={"logit_scale": NUMBER, "use_qk_norm": FLAG},
    ),
    Names(ops=_PAIRS),
    GGUFForm(
        "command-r",
        gguf_names(ops=_PAIRS),
        sizes=gguf_sizes(layer_norm="layer_norm_eps"),
        options={"logit_scale": "logit_scale"},
        read=_read_gguf,
        head_dim=None,
    ),
)
