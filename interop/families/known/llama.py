"""Llama 2 and 3, and models of the same form (SmolLM2, TinyLlama, ...).

Sources: transformers `LlamaConfig` and `LlamaForCausalLM`; llama.cpp's GGUF specification.
"""

from __future__ import annotations

from cairn.interop.families.config_form import ConfigForm, Refused
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import LLAMA_ENGINE
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm
from cairn.interop.families.gguf_names import ROTARY_PAIRS, gguf_names
from cairn.interop.families.names import Names


def _plain(content: GGUFContent) -> bool:
    """Return whether a file is Llama's: it has neither experts, as Mixtral's have, nor windows."""
    said = content.metadata
    return not said.get("expert_count") and not said.get("attention.sliding_window")


FAMILY = Family(
    ConfigForm(
        "llama",
        "LlamaForCausalLM",
        options={
            "attention_bias": ("attention_bias", False),
            "head_dim": ("head_dim", None),
            "initializer_range": ("initializer_range", 0.02),
            "mlp_bias": ("mlp_bias", False),
            "num_key_value_heads": ("num_key_value_heads", None),
            "rms_norm_eps": ("rms_norm_eps", 1e-6),
            "tie_word_embeddings": ("tie_word_embeddings", False),
        },
        refused={
            "pretraining_tp": Refused((1, None), "only changes the order of sums; set it to 1"),
        },
        read=lambda data, options: {"attention_out_bias": options["attention_bias"]},
    ),
    Names(),
    GGUFForm(
        "llama",
        gguf_names(ops=ROTARY_PAIRS),
        flags={"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_gate.bias"},
        only={"attention.sliding_window": (0,), "tensor_data_layout": ("Meta AI original pth",)},
        fits=_plain,
        engine=LLAMA_ENGINE,
    ),
)
