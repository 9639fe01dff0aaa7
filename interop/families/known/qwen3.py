"""Qwen3: Llama whose queries and keys are normalised, head by head.

Source: transformers `Qwen3Config`, `Qwen3ForCausalLM`.
"""

from __future__ import annotations

from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFForm
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.names import Names
from cairn.interop.families.qwen_windows import QWEN_WINDOW_KEYS, read_windows, write_windows

FAMILY = Family(
    ConfigForm(
        "qwen3",
        "Qwen3ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            head_dim=("head_dim", 128),
            num_key_value_heads=("num_key_value_heads", 32),
        ),
        fixed={"qk_norm": "head"},
        also_read=QWEN_WINDOW_KEYS,
        read=lambda data, options: {
            **read_windows(data, options),
            "attention_out_bias": options["attention_bias"],
        },
        write=write_windows,
        nulls=frozenset({"sliding_window", "num_key_value_heads"}),
    ),
    Names(),
    GGUFForm(
        "qwen3",
        gguf_names(),
        flags={"attention_bias": "blk.0.attn_q.bias"},
        engine=Engine({"attention_bias": (False,)}, wide_heads=True),
    ),
)
