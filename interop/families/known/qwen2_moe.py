"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with many experts, and a shared one that every token uses.

Source: transformers `Qwen2MoeConfig`, `Qwen2MoeForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import FULL, WINDOW, DecoderConfig
from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.families.config_form import ConfigForm, usual_options, windows_from_hf
from cairn.interop.families.experts import (
    ROUTER_IS_NO_LINEAR,
    SPARSE_KEYS,
    dense_layers,
    experts_of,
    write_dense_layers,
)
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.names import EXPERTS, Names

_SHARED = ("gate_proj", "up_proj", "down_proj")


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
    last = data.get("max_window_layers", 28)
    types = windows_from_hf(
        data, options, lambda layer: bool(window) and layer % 2 == 0 and layer < last
    )
    experts = ExpertsConfig(
        count=data.get("num_experts", 60),
        per_token=data.get("num_experts_per_tok", 4),
        intermediate_size=data.get("moe_intermediate_size", 1408),
        normalize=bool(data.get("norm_topk_prob", False)),
        shared_size=data.get("shared_expert_intermediate_size", 5632),
        shared_gate=True,
        dense_layers=dense_layers(data, options),
    )
    some = WINDOW in types["layer_types"]
    return types | {"sliding_window": window if some else None, "experts": experts}


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts = experts_of(config)
    types = config.layer_types or (FULL,) * config.num_hidden_layers
    return write_dense_layers(experts) | {
        "layer_types": list(types),
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "shared_expert_intermediate_size": experts.shared_size,
        "sliding_window": config.sliding_window,
        "use_sliding_window": WINDOW in types,
    }


FAMILY = Family(
    ConfigForm(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        options=usual_options(
            num_key_value_heads=("num_key_value_heads", 16),
            qkv_bias=("attention_bias", True),
        ),
        also_read=SPARSE_KEYS
        | {"layer_types", "sliding_window", "use_sliding_window", "max_window_layers"}
        | {"num_experts", "shared_expert_intermediate_size"},
        carried=frozenset({"output_router_logits", "router_aux_loss_coef"}),
        read=_read,
        write=_write,
        nulls=frozenset({"sliding_window"}),
    ),
    Names(
        layer_names={
            "mlp/router": "mlp.gate",
            "mlp/shared_gate": "mlp.shared_expert_gate",
            **{f"mlp/shared/{name}": f"mlp.shared_expert.{name}" for name in _SHARED},
        },
        stacked=EXPERTS,
        no_adapters=ROUTER_IS_NO_LINEAR,
    ),
    GGUFForm(
        "qwen2moe",
        gguf_names(),
        sizes={
            **gguf_sizes(),
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        flags={"qkv_bias": "blk.0.attn_q.bias"},
        fixed={"norm_topk_prob": False},
        only={"expert_weights_norm": (False,)},
        engine=Engine(needs_head=True),
    ),
)
