"""Qwen3-MoE: Qwen3 with many experts.

Source: transformers `Qwen3MoeConfig`, `Qwen3MoeForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.experts import (
    DENSE_TAKEN_FOR_EXPERTS,
    SPARSE_KEYS,
    dense_layers,
    experts_of,
    write_dense_layers,
)
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.key_kinds import COUNT_OR_ZERO, FLAG
from cairn.interop.families.names import Names


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    window = data.get("sliding_window", 4096) if data.get("use_sliding_window") else None
    experts = ExpertsConfig(
        count=data.get("num_experts", data.get("num_local_experts", 128)),
        per_token=data.get("num_experts_per_tok", 8),
        intermediate_size=data.get("moe_intermediate_size", 768),
        normalize=bool(data.get("norm_topk_prob", False)),
        dense_layers=dense_layers(data, options),
    )
    return {
        "attention_out_bias": options["attention_bias"],
        "experts": experts,
        "sliding_window": window,
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return write_dense_layers(experts) | {
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.per_token,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
    }


FAMILY = Family(
    ConfigForm(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            num_key_value_heads=("num_key_value_heads", 4),
        ),
        fixed={"qk_norm": "head"},
        also_read=SPARSE_KEYS
        | {"num_experts", "num_local_experts", "sliding_window", "use_sliding_window"},
        refused={
            "qkv_bias": Refused((False, None), "attention_bias says whether there are biases"),
            "shared_expert_intermediate_size": Refused((0, None), "no layer has a shared expert"),
            "use_qk_norm": Refused((True, None), "queries and keys are normalised"),
        },
        carried=frozenset({"max_window_layers", "output_router_logits", "router_aux_loss_coef"}),
        read=_read,
        write=_write,
        nulls=frozenset({"sliding_window"}),
        kinds={"shared_expert_intermediate_size": COUNT_OR_ZERO, "use_qk_norm": FLAG},
    ),
    Names(layer_names={"mlp/router": "mlp.gate"}, no_adapters=DENSE_TAKEN_FOR_EXPERTS),
    GGUFForm(
        "qwen3moe",
        gguf_names(),
        sizes={
            **gguf_sizes(),
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        flags={"attention_bias": "blk.0.attn_q.bias"},
        fixed={"norm_topk_prob": True},
        only={"expert_weights_norm": (True,)},
        engine=Engine({"attention_bias": (False,)}, wide_heads=True),
    ),
)
