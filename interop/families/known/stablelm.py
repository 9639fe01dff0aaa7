"""StableLM: LayerNorm; a quarter of each head is rotated; queries and keys may have norms by head.

Source: transformers `StableLmConfig`, `StableLmForCausalLM`.
"""

from __future__ import annotations

from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.names import Names

FAMILY = Family(
    ConfigForm(
        "stablelm",
        "StableLmForCausalLM",
        options=usual_options(
            head_dim=None,
            layer_norm_eps=("rms_norm_eps", 1e-5),
            num_key_value_heads=("num_key_value_heads", 32),
            rms_norm_eps=None,
            use_qkv_bias=("attention_bias", False),
        ),
        fixed={"norm": "layer", "norm_bias": True},
        rotary_fraction=("partial_rotary_factor", 0.25),
        also_read=frozenset({"qk_layernorm", "use_parallel_residual"}),
        read=lambda data, options: {
            "block": "parallel" if data.get("use_parallel_residual") else "pre",
            "qk_norm": "each_head" if data.get("qk_layernorm") else None,
            "shared_norm": bool(data.get("use_parallel_residual")),
        },
        write=lambda config: {
            "qk_layernorm": config.qk_norm is not None,
            "use_parallel_residual": config.block == "parallel",
        },
        nulls=frozenset({"num_key_value_heads"}),
    ),
    Names(
        stacked={
            f"self_attn/{name}_norm": f"self_attn.{name}_layernorm.norms.{{number}}"
            for name in "qk"
        },
    ),
    GGUFForm(
        "stablelm",
        gguf_names(),
        sizes=gguf_sizes(layer_norm="layer_norm_eps"),
        flags={"qk_layernorm": "blk.0.attn_q_norm.weight", "use_qkv_bias": "blk.0.attn_q.bias"},
        # Some files have the key set wrongly to true: the norm's tensor decides.
        also_read=frozenset({"use_parallel_residual"}),
        read=lambda content, data: {
            "use_parallel_residual": "blk.0.ffn_norm.weight" not in content.shapes
        },
        write=lambda config, said: {"use_parallel_residual": config.block == "parallel"},
        head_dim=None,
        part_turns=True,
        engine=Engine(needs_head=True),
    ),
)
