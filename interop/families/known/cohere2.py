"""Command R7B and Command A: three of four layers have a window and rotary positions.

Source: transformers `Cohere2Config`, `Cohere2ForCausalLM`; llama.cpp's `cohere2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.decoder import FULL
from cairn.interop.errors import ConfigError
from cairn.interop.families.config_form import ConfigForm, Refused, usual_options, windows_from_hf
from cairn.interop.families.family import Family
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm, gguf_sizes, refuse_own_head
from cairn.interop.families.gguf_names import ROTARY_PAIRS, gguf_names
from cairn.interop.families.key_kinds import COUNT, FLAG, NUMBER, TEXT
from cairn.interop.families.names import Names

_PATTERN = 4


def _read(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    width, heads = options["hidden_size"], options["num_attention_heads"]
    if data.get("head_dim") not in (None, width // heads):
        raise ConfigError(
            path=f"config.json of a {data['model_type']!r} model: head_dim",
            expected=f"{width // heads}, which transformers takes whatever the file says",
            found=repr(data["head_dim"]),
            next_step="leave it out, or correct hidden_size or num_attention_heads",
        )
    pattern = data.get("sliding_window_pattern", _PATTERN)
    windowed = windows_from_hf(data, options, lambda layer: bool((layer + 1) % pattern))
    return windowed | {
        "attention_out_bias": options["attention_bias"],
        "layers_without_rope": tuple(
            number for number, kind in enumerate(windowed["layer_types"]) if kind == FULL
        ),
    }


def _read_gguf(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    refuse_own_head(content, "cohere2")
    return {"logit_scale": data.get("logit_scale") or 1.0}


FAMILY = Family(
    ConfigForm(
        "cohere2",
        "Cohere2ForCausalLM",
        options=usual_options(
            attention_bias=("attention_bias", False),
            head_dim=None,
            layer_norm_eps=("rms_norm_eps", 1e-5),
            logit_scale=("logit_scale", 0.0625),
            rms_norm_eps=None,
            sliding_window=("sliding_window", 4096),
            tie_word_embeddings=("tie_word_embeddings", True),
        ),
        fixed={"block": "parallel", "norm": "layer", "shared_norm": True},
        refused={
            "cache_implementation": Refused(("hybrid", None), "caches are the decoder's own"),
            "order_of_interleaved_layers": Refused(("local_attn_first", None), "windows are first"),
            "position_embedding_type": Refused(("rope_gptj", None), "neighbours turn together"),
            "rotary_pct": Refused((1, 1.0, None), "all of each head turns"),
            "use_gated_activation": Refused((True, None), "the MLP has a gate"),
            "use_parallel_block": Refused((True, None), "attention and MLP are side by side"),
            "use_qk_norm": Refused((False, None), "nothing reads it"),
        },
        carried=frozenset({"layer_switch", "use_embedding_sharing", "use_parallel_embedding"}),
        also_read=frozenset({"head_dim", "layer_types", "sliding_window_pattern"}),
        read=_read,
        write=lambda config: {
            "head_dim": config.head_size,
            "layer_types": list(config.layer_types or (FULL,) * config.num_hidden_layers),
        },
        kinds={
            **dict.fromkeys(("order_of_interleaved_layers", "position_embedding_type"), TEXT),
            **dict.fromkeys(("use_embedding_sharing", "use_gated_activation"), FLAG),
            **dict.fromkeys(("use_parallel_block", "use_parallel_embedding", "use_qk_norm"), FLAG),
            **{"layer_switch": COUNT, "logit_scale": NUMBER, "sliding_window_pattern": COUNT},
        },
    ),
    Names(ops=ROTARY_PAIRS),
    # llama.cpp has no other pattern and no biases.
    GGUFForm(
        "cohere2",
        gguf_names(ops=ROTARY_PAIRS),
        sizes=gguf_sizes(layer_norm="layer_norm_eps"),
        options={
            "attention.sliding_window": "sliding_window",
            "logit_scale": "logit_scale",
        },
        fixed={"sliding_window_pattern": _PATTERN},
        read=_read_gguf,
        head_dim=None,
        engine=Engine(windows=True),
    ),
)
