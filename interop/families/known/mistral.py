"""Mistral 7B, Nemo, Small and models of the same form: Llama with an optional window.

Source: transformers `MistralConfig`, `MistralForCausalLM`.
"""

from __future__ import annotations

from cairn.interop.families.config_form import ConfigForm, Refused, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import LLAMA_ENGINE
from cairn.interop.families.gguf_form import GGUFForm
from cairn.interop.families.gguf_names import ROTARY_PAIRS, gguf_names
from cairn.interop.families.names import Names

FAMILY = Family(
    ConfigForm(
        "mistral",
        "MistralForCausalLM",
        options=usual_options(
            num_key_value_heads=("num_key_value_heads", 8),
            sliding_window=("sliding_window", 4096),
        ),
        refused={
            "attention_bias": Refused((False, None), "attention has no biases"),
            "mlp_bias": Refused((False, None), "the MLP has no biases"),
        },
        nulls=frozenset({"sliding_window", "num_key_value_heads"}),
    ),
    Names(),
    GGUFForm(
        "llama",
        gguf_names(ops=ROTARY_PAIRS),
        options={"attention.sliding_window": "sliding_window"},
        fits=lambda content: (
            bool(content.metadata.get("attention.sliding_window"))
            and not content.metadata.get("expert_count")
        ),
        engine=LLAMA_ENGINE,
    ),
)
