"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values.

Source: transformers `Qwen2Config`, `Qwen2ForCausalLM`.
"""

from __future__ import annotations

from cairn.interop.families.config_form import ConfigForm, usual_options
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_form import GGUFForm
from cairn.interop.families.gguf_names import gguf_names
from cairn.interop.families.names import Names
from cairn.interop.families.qwen_windows import QWEN_WINDOW_KEYS, read_windows, write_windows

FAMILY = Family(
    ConfigForm(
        "qwen2",
        "Qwen2ForCausalLM",
        options=usual_options(num_key_value_heads=("num_key_value_heads", 32)),
        fixed={"attention_bias": True},
        also_read=QWEN_WINDOW_KEYS,
        read=read_windows,
        write=write_windows,
        nulls=frozenset({"sliding_window", "num_key_value_heads"}),
    ),
    Names(),
    GGUFForm("qwen2", gguf_names()),
)
