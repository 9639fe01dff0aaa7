"""OLMo 2: norms on the outputs of attention and MLP, and over all queries of a token.

Source: transformers `Olmo2Config`, `Olmo2ForCausalLM`; arXiv 2501.00656.
"""

from __future__ import annotations

from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.names import SANDWICH, Names

FAMILY = Family(
    ConfigForm(
        "olmo2",
        "Olmo2ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            rms_norm_eps=("rms_norm_eps", 1e-5),
        ),
        fixed={"block": "post", "qk_norm": "whole"},
        read=lambda data, options: {"attention_out_bias": options["attention_bias"]},
    ),
    Names(layer_names=SANDWICH),
    GGUFForm(
        "olmo2",
        gguf_names(),
        flags={"attention_bias": "blk.0.attn_q.bias"},
        fits=lambda content: not content.metadata.get("attention.sliding_window"),
        engine=Engine({"attention_bias": (False,)}, needs_head=True),
    ),
)
