"""Mixtral: Mistral with eight experts in each layer, of which each token uses two.

Source: transformers `MixtralConfig`, `MixtralForCausalLM`; arXiv 2401.04088.
"""

from __future__ import annotations

from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.experts import experts_of
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import LLAMA_ENGINE
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import ROTARY_PAIRS, gguf_names
from cairn.interop.families.names import Names

FAMILY = Family(
    ConfigForm(
        "mixtral",
        "MixtralForCausalLM",
        options=usual_options(
            num_key_value_heads=("num_key_value_heads", 8),
            rms_norm_eps=("rms_norm_eps", 1e-5),
            sliding_window=("sliding_window", None),
        ),
        refused={
            "attention_bias": Refused((False, None), "attention has no biases"),
            "mlp_bias": Refused((False, None), "the experts have no biases"),
            "router_jitter_noise": Refused((0, 0.0, None), "the router adds no noise"),
        },
        rope_theta=1e6,
        also_read=frozenset({"num_local_experts", "num_experts_per_tok"}),
        carried=frozenset({"output_router_logits", "router_aux_loss_coef"}),
        read=lambda data, options: {
            "experts": ExpertsConfig(
                count=data.get("num_local_experts", 8),
                per_token=data.get("num_experts_per_tok", 2),
                intermediate_size=options["intermediate_size"],
            )
        },
        write=lambda config: {
            "num_local_experts": experts_of(config).count,
            "num_experts_per_tok": experts_of(config).per_token,
        },
        nulls=frozenset({"num_key_value_heads"}),
    ),
    Names(
        layer_names={"mlp/router": "block_sparse_moe.gate"},
        stacked={
            f"mlp/experts/{path}": f"block_sparse_moe.experts.{{number}}.{name}"
            for path, name in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
        },
    ),
    GGUFForm(
        "llama",
        gguf_names(ops=ROTARY_PAIRS),
        sizes={
            **gguf_sizes(),
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        only={"attention.sliding_window": (0,), "expert_weights_norm": (True,)},
        fits=lambda content: bool(content.metadata.get("expert_count")),
        engine=LLAMA_ENGINE,
    ),
)
