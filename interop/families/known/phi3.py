"""Phi-3, Phi-3.5 and Phi-4: fused projections; the small Phi-4 rotates three quarters of a head.

Source: transformers `Phi3Config`, `Phi3ForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm
from cairn.interop.families.gguf_names import FUSED_MLP, FUSED_QKV, gguf_names
from cairn.interop.families.names import Fused, Names


def _write(config: DecoderConfig) -> Mapping[str, Any]:
    rope = config.rope
    original = None if rope is None else rope.original_max_position_embeddings
    return {
        "original_max_position_embeddings": original or config.max_position_embeddings,
    }


FAMILY = Family(
    ConfigForm(
        "phi3",
        "Phi3ForCausalLM",
        options=usual_options(
            head_dim=None,
            num_key_value_heads=("num_key_value_heads", None),
            rms_norm_eps=("rms_norm_eps", 1e-5),
            sliding_window=("sliding_window", None),
        ),
        refused={
            "attention_bias": Refused((False, None), "transformers has none"),
            "full_attn_mod": Refused((1, None), "every layer is as the others"),
            "interpolate_factor": Refused((1, None), "positions are whole"),
            "lm_head_bias": Refused((False, None), "transformers has none"),
            "mlp_bias": Refused((False, None), "transformers has none"),
        },
        rope_original=4096,
        rope_names={"su": "longrope"},  # in the first files of Phi-3-mini-128k
        rotary_fraction=("partial_rotary_factor", 1.0),
        also_read=frozenset({"auto_map", "original_max_position_embeddings"}),
        write=_write,
    ),
    Names(
        fused=(
            Fused("self_attn.qkv_proj", tuple(f"self_attn/{name}_proj" for name in "qkv")),
            Fused("mlp.gate_up_proj", ("mlp/gate_proj", "mlp/up_proj")),
        )
    ),
    GGUFForm(
        "phi3",
        gguf_names(fused=(FUSED_QKV, FUSED_MLP), tolerated=(r"rope_factors_(long|short)\.weight",)),
        options={"rope.scaling.original_context_length": "original_max_position_embeddings"},
        also_read=frozenset({"attention.sliding_window"}),
        read=lambda content, data: {
            "sliding_window": content.metadata.get("attention.sliding_window") or None
        },
        write=lambda config, said: {"attention.sliding_window": config.sliding_window or 0},
        head_dim=None,
        part_turns=True,
        engine=Engine(scalings=frozenset({"longrope"})),
    ),
)
