"""gpt-oss: every other layer has a window, each head a sink; experts with biases and clamped gates.

Source: transformers `GptOssConfig`, `GptOssForCausalLM`; arXiv 2508.10925.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import FULL, DecoderConfig
from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.conversion.ops import Interleaved
from cairn.interop.conversion.rules import Rule
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options, windows_from_hf
from cairn.interop.families.experts import ROUTER_IS_NO_LINEAR, experts_of
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import (
    GGUFContent,
    GGUFForm,
    gguf_sizes,
    gguf_window_layers,
    gguf_windows,
)
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.hf_config import rope_from_hf
from cairn.interop.families.names import Names

_THETA = 150000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Rotary scaling that transformers assumes for a file without any."""
_CUT = "rope.scaling.yarn_truncate"
"""Key that only our files have: YaRN rounds its bounds.

llama.cpp always rounds them; published models don't.
"""


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    experts = ExpertsConfig(
        count=data.get("num_local_experts", 128),
        per_token=data.get("num_experts_per_tok", 4),
        intermediate_size=options["intermediate_size"],
        router_bias=True,
        bias=True,
    )
    rope = {}
    if not data.get("rope_scaling") and data.get("rope_parameters") is None:
        where = f"config.json of a {data['model_type']!r} model"
        rope["rope"] = rope_from_hf({**data, "rope_parameters": _YARN}, where, theta=_THETA)
    return windows_from_hf(data, options, lambda layer: layer % 2 == 0) | {
        **rope,
        "attention_out_bias": options["attention_bias"],
        "experts": experts,
        "hidden_act": "clamped_silu",
    }


def _write(config: DecoderConfig) -> dict[str, Any]:
    experts = experts_of(config)
    return {
        "hidden_act": "silu",
        "layer_types": list(config.layer_types or (FULL,) * config.num_hidden_layers),
        "num_experts_per_tok": experts.per_token,
        "num_local_experts": experts.count,
    }


def _experts(config: DecoderConfig, block: str, prefix: str) -> list[Rule]:
    """Return the experts' rules: one tensor [experts, in, out], with gates and ups alternating."""
    return [
        Rule(
            tuple(f"{block}/mlp/experts/{name}/{leaf}" for name in ("gate_proj", "up_proj")),
            (f"{prefix}.mlp.experts.gate_up_proj{suffix}",),
            Interleaved(),
        )
        for leaf, suffix in (("kernel", ""), ("bias", "_bias"))
    ] + [
        Rule.one(f"{block}/mlp/experts/down_proj/{leaf}", f"{prefix}.mlp.experts.down_proj{suffix}")
        for leaf, suffix in (("kernel", ""), ("bias", "_bias"))
    ]


def _read_gguf(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a GGUF file's keys of config.json: windows, and whether YaRN rounds its bounds."""
    rope = data["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope = {**rope, "truncate": content.metadata.get(_CUT, False)}
    layers = gguf_window_layers(content, data["num_hidden_layers"], 2)
    return {"layer_types": layers, "rope_parameters": rope}


def _write_gguf(config: DecoderConfig, said: Mapping[str, Any]) -> dict[str, Any]:
    more = {_CUT: True} if config.rope is not None and config.rope.scaling == "yarn" else {}
    return gguf_windows(config, said) | {"feed_forward_length": config.intermediate_size, **more}


FAMILY = Family(
    ConfigForm(
        "gpt_oss",
        "GptOssForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", True),
            head_dim=("head_dim", 64),
            num_key_value_heads=("num_key_value_heads", 8),
            rms_norm_eps=("rms_norm_eps", 1e-5),
            sliding_window=("sliding_window", 128),
            swiglu_limit=("activation_limit", 7.0),
        ),
        fixed={"attention_sinks": True},
        refused={"swiglu_alpha": Refused((1.702, None), "no other was trained")},
        rope_theta=_THETA,
        also_read=frozenset(
            {"experts_per_token", "layer_types", "num_experts_per_tok", "num_local_experts"}
        ),
        carried=frozenset(
            {"initial_context_length", "output_router_logits", "router_aux_loss_coef"}
        ),
        read=_read,
        write=_write,
    ),
    Names(
        no_adapters=ROUTER_IS_NO_LINEAR,
        special=_experts,
        special_layers=frozenset(f"mlp/experts/{name}_proj" for name in ("gate", "up", "down")),
        stacked={},
    ),
    GGUFForm(
        "gpt-oss",
        gguf_names(layer_names={"post_attention_layernorm": "post_attention_norm"}),
        sizes={
            **gguf_sizes(intermediate_size=""),
            "attention.sliding_window": "sliding_window",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "expert_used_count": "num_experts_per_tok",
        },
        flags={"attention_bias": "blk.0.attn_q.bias"},
        also_read=frozenset({"attention.sliding_window_pattern", "feed_forward_length", _CUT}),
        only={"expert_gating_func": (3,)},  # softmax over the chosen experts
        read=_read_gguf,
        write=_write_gguf,
        engine=Engine({"attention_bias": (True,)}, needs_head=True, windows=True, wide_heads=True),
    ),
)
