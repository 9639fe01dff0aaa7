"""GPT-NeoX and Pythia: parallel attention and MLP; queries, keys and values fused head by head.

Source: transformers `GPTNeoXConfig`, `GPTNeoXForCausalLM`; arXiv 2204.06745.
"""

from __future__ import annotations

from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import FUSED_QKV, gguf_names
from cairn.interop.families.names import Names, qkv_by_group

FAMILY = Family(
    ConfigForm(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", True),
            head_dim=None,
            layer_norm_eps=("rms_norm_eps", 1e-5),
            num_key_value_heads=None,
            rms_norm_eps=None,
        ),
        fixed={"gated_mlp": False, "mlp_bias": True, "norm": "layer", "norm_bias": True},
        activation=("hidden_act", "gelu"),
        rotary_fraction=("rotary_pct", 0.25),
        rotary_theta="rotary_emb_base",
        also_read=frozenset({"use_parallel_residual"}),
        carried=frozenset({"classifier_dropout"}),
        read=lambda data, options: {
            "attention_out_bias": options["attention_bias"],
            "block": "parallel" if data.get("use_parallel_residual", True) else "pre",
        },
        write=lambda config: {"use_parallel_residual": config.block == "parallel"},
    ),
    Names(
        top={
            "model/embed_tokens": "gpt_neox.embed_in",
            "model/norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
        },
        layer="gpt_neox.layers.{layer}",
        layer_names={
            "self_attn/o_proj": "attention.dense",
            "mlp/up_proj": "mlp.dense_h_to_4h",
            "mlp/down_proj": "mlp.dense_4h_to_h",
        },
        fused=(qkv_by_group("attention.query_key_value"),),
        modules={"embed_out": "lm_head"},
        tolerated=(r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\.inv_freq)",),
    ),
    GGUFForm(
        "gptneox",
        gguf_names(fused=(FUSED_QKV,)),
        sizes=gguf_sizes(layer_norm="layer_norm_eps"),
        options={"use_parallel_residual": "use_parallel_residual"},
        flags={"attention_bias": "blk.0.attn_qkv.bias"},
        heads=None,
        head_dim=None,
        part_turns=True,
        engine=Engine({"attention_bias": (True,)}, needs_head=True),
    ),
)
