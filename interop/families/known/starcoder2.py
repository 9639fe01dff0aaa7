"""StarCoder2: LayerNorm, biases everywhere, no gate in the MLP, perhaps a window in all layers.

Source: transformers `Starcoder2Config`, `Starcoder2ForCausalLM`; arXiv 2402.19173.
"""

from __future__ import annotations

from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_form import GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.key_kinds import FLAG, NUMBER, TEXT
from cairn.interop.families.names import Names

FAMILY = Family(
    ConfigForm(
        "starcoder2",
        "Starcoder2ForCausalLM",
        options=usual_options(
            initializer_range=("initializer_range", 0.018042),
            norm_epsilon=("rms_norm_eps", 1e-5),
            num_key_value_heads=("num_key_value_heads", 2),
            rms_norm_eps=None,
            sliding_window=("sliding_window", None),
            tie_word_embeddings=("tie_word_embeddings", True),
            use_bias=("attention_bias", True),
        ),
        fixed={"gated_mlp": False, "norm": "layer", "norm_bias": True},
        refused={
            "mlp_type": Refused(("default", None), "transformers has no other"),
            "norm_type": Refused(("layer_norm", None), "transformers has no other"),
        },
        activation=("hidden_act", "gelu_pytorch_tanh"),
        read=lambda data, options: {
            "attention_out_bias": options["attention_bias"],
            "mlp_bias": options["attention_bias"],
        },
        kinds={
            **dict.fromkeys(("mlp_type", "norm_type"), TEXT),
            "norm_epsilon": NUMBER,
            "use_bias": FLAG,
        },
    ),
    Names(layer_names={"mlp/up_proj": "mlp.c_fc", "mlp/down_proj": "mlp.c_proj"}),
    # llama.cpp requires biases, and heads of size width / heads; it has no window here.
    GGUFForm(
        "starcoder2", gguf_names(), sizes=gguf_sizes(layer_norm="norm_epsilon"), head_dim=None
    ),
)
