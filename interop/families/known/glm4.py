"""GLM-4 of 2025: norms before and after; half of each head is rotated, in neighbouring pairs.

Source: transformers `Glm4Config`, `Glm4ForCausalLM`.
"""

from __future__ import annotations

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.rope import RopeConfig
from cairn.interop.conversion.ops import TRANSPOSE, Chain, Op, RotaryRows
from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm
from cairn.interop.families.gguf_names import FUSED_MLP, gguf_names
from cairn.interop.families.names import Fused, Names


def _turning(heads: int, config: DecoderConfig, leaf: str) -> Op:
    turning = (config.rope or RopeConfig()).rotary_dim(config.head_size)
    rows = RotaryRows(heads, turning=turning)
    return rows if leaf == "bias" else Chain((rows, TRANSPOSE))


_PAIRS = {
    "self_attn/q_proj": lambda config, leaf: _turning(config.num_attention_heads, config, leaf),
    "self_attn/k_proj": lambda config, leaf: _turning(config.kv_heads, config, leaf),
}

FAMILY = Family(
    ConfigForm(
        "glm4",
        "Glm4ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", True),
            head_dim=("head_dim", 128),
            num_key_value_heads=("num_key_value_heads", 2),
            rms_norm_eps=("rms_norm_eps", 1.5625e-07),
        ),
        fixed={"block": "sandwich"},
        rotary_fraction=("partial_rotary_factor", 0.5),
        nulls=frozenset({"partial_rotary_factor"}),  # null: whole heads are rotated
    ),
    Names(
        layer_names={
            "attention_output_norm": "post_self_attn_layernorm",
            "mlp_output_norm": "post_mlp_layernorm",
        },
        fused=(Fused("mlp.gate_up_proj", ("mlp/gate_proj", "mlp/up_proj")),),
        ops=_PAIRS,
    ),
    GGUFForm(
        "glm4",
        gguf_names(fused=(FUSED_MLP,), ops=_PAIRS),
        flags={"attention_bias": "blk.0.attn_q.bias"},
        part_turns=True,
        engine=Engine(wide_heads=True),
    ),
)
