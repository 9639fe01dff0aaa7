"""GPT-2: learned positions, LayerNorm; weights are stored [in, out], as our leaves are.

Source: transformers `GPT2Config`, `GPT2LMHeadModel`.
"""

from __future__ import annotations

from cairn.interop.conversion.ops import RENAME
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import FUSED_QKV, gguf_names
from cairn.interop.families.names import Fused, Names

_SIZES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "vocab_size": "vocab_size",
}


FAMILY = Family(
    ConfigForm(
        "gpt2",
        "GPT2LMHeadModel",
        sizes=_SIZES,
        options=usual_options(
            head_dim=None,
            layer_norm_epsilon=("rms_norm_eps", 1e-5),
            num_key_value_heads=None,
            rms_norm_eps=None,
            tie_word_embeddings=("tie_word_embeddings", True),
        ),
        fixed={
            "attention_bias": True,
            "attention_out_bias": True,
            "gated_mlp": False,
            "learned_positions": True,
            "mlp_bias": True,
            "norm": "layer",
            "norm_bias": True,
        },
        refused={
            "scale_attn_by_inverse_layer_idx": Refused((False, None), "no layer has another scale"),
        },
        activation=("activation_function", "gelu_new"),
        rope_theta=None,
        also_read=frozenset({"n_inner", "scale_attn_weights"}),
        carried=frozenset(
            {
                *("n_ctx", "reorder_and_upcast_attn", "summary_activation"),
                *("summary_first_dropout", "summary_proj_to_labels", "summary_type"),
                "summary_use_proj",
            }
        ),
        read=lambda data, options: {
            "attention_scale": None if data.get("scale_attn_weights", True) else 1.0,
            "intermediate_size": data.get("n_inner") or 4 * options["hidden_size"],
            "rope": None,
        },
        write=lambda config: {
            "n_inner": None
            if config.intermediate_size == 4 * config.hidden_size
            else config.intermediate_size,
            "scale_attn_weights": config.attention_scale is None,
        },
    ),
    Names(
        top={
            "model/embed_tokens": "transformer.wte",
            "model/embed_positions": "transformer.wpe",
            "model/norm": "transformer.ln_f",
            "lm_head": "lm_head",
        },
        layer="transformer.h.{layer}",
        layer_names={
            "input_layernorm": "ln_1",
            "self_attn/o_proj": "attn.c_proj",
            "post_attention_layernorm": "ln_2",
            "mlp/up_proj": "mlp.c_fc",
            "mlp/down_proj": "mlp.c_proj",
        },
        fused=(Fused("attn.c_attn", tuple(f"self_attn/{name}_proj" for name in "qkv")),),
        kernel=RENAME,
        tolerated=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
        optional_prefix="transformer.",
    ),
    GGUFForm(
        "gpt2",
        gguf_names(fused=(FUSED_QKV,), tolerated=()),
        sizes=gguf_sizes(
            hidden_size="n_embd",
            intermediate_size="n_inner",
            layer_norm="layer_norm_epsilon",
            max_position_embeddings="n_positions",
            num_attention_heads="n_head",
            num_hidden_layers="n_layer",
        ),
        heads=None,
        head_dim=None,
        rope=False,
    ),
)
