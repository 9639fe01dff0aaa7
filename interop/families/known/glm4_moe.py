"""GLM-4.5, 4.6 and 4.7: experts chosen as in DeepSeek V3; half of each head is rotated.

The layers that predict further tokens (`num_nextn_predict_layers`) are left out, as transformers
leaves them out. Source: transformers `Glm4MoeConfig`, `Glm4MoeForCausalLM`; arXiv 2508.06471.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.deepseek import (
    EXPERT_LAYERS,
    read_experts,
    without_further_tokens,
    write_experts,
)
from cairn.interop.families.experts import DENSE_TAKEN_FOR_EXPERTS
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_experts import (
    EXPERT_GATING,
    EXPERT_KEYS,
    EXPERT_SIZES,
    SIGMOID,
    expert_problems,
    read_gguf_experts,
    write_gguf_experts,
)
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.key_kinds import FLAG
from cairn.interop.families.names import Names

_NAMES = Names(layer_names=EXPERT_LAYERS, no_adapters=DENSE_TAKEN_FOR_EXPERTS)

_GGUF_NAMES = gguf_names(layer_names={"post_attention_layernorm": "post_attention_norm"})
_FURTHER = "nextn_predict_layers"
"""Metadata key: the number of layers that predict further tokens; the file counts them as well."""


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8}
    usual |= {"moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1}
    return read_experts(
        data,
        options,
        usual,
        score="sigmoid",
        correction=True,
        group_score="top2",
        normalize=bool(data.get("norm_topk_prob", True)),
        scale=float(data.get("routed_scaling_factor", 1.0)),
        first_dense=data.get("first_k_dense_replace", 1),
    ) | {"qk_norm": "head" if data.get("use_qk_norm") else None}


def _read_gguf(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    further = content.metadata.get(_FURTHER, 0)
    return read_gguf_experts(content.metadata) | {
        "num_hidden_layers": data["num_hidden_layers"] - further,
        "num_nextn_predict_layers": further,
    }


FAMILY = Family(
    ConfigForm(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            num_key_value_heads=("num_key_value_heads", 8),
            rms_norm_eps=("rms_norm_eps", 1e-5),
        ),
        rotary_fraction=("partial_rotary_factor", 0.5),
        also_read=frozenset(
            {
                *("first_k_dense_replace", "moe_intermediate_size", "n_group", "n_routed_experts"),
                *("n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "topk_group"),
                *("routed_scaling_factor", "use_qk_norm"),
            }
        ),
        carried=frozenset({"num_mtp_layers", "num_nextn_predict_layers", "output_router_logits"}),
        read=_read,
        write=lambda config: write_experts(config) | {"use_qk_norm": config.qk_norm is not None},
        nulls=frozenset({"partial_rotary_factor"}),  # null: whole heads are rotated
        kinds={"use_qk_norm": FLAG},
    ),
    lambda config: without_further_tokens(_NAMES, config),
    GGUFForm(
        "glm4moe",
        lambda config: without_further_tokens(_GGUF_NAMES, config, 0),
        sizes={**gguf_sizes(), **EXPERT_SIZES},
        flags={
            "attention_bias": "blk.0.attn_q.bias",
            "use_qk_norm": "blk.0.attn_q_norm.weight",
        },
        only={EXPERT_GATING: (SIGMOID,)},
        also_read=EXPERT_KEYS | {_FURTHER},
        read=_read_gguf,
        write=lambda config, said: write_gguf_experts(config),
        part_turns=True,
        engine=Engine(wide_heads=True, problems=expert_problems),
    ),
)
