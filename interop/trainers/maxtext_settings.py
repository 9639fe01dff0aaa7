"""MaxText's own config file, `config.yml`, as the keys of config.json that a tree does not tell.

MaxText writes one `key: value` to a line. Nothing else of YAML is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from cairn.counts import count_text
from cairn.interop.errors import ConfigError

__all__ = ["FILE", "flat_yaml", "from_maxtext", "is_maxtext", "sizes_in"]

FILE: Final = "config.yml"
"""Name of the file that MaxText writes to a run's folder, with `save_config_to_gcs=True`."""

_FAMILIES: Final = {
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "llama2": "llama",
    "mistral": "mistral",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
}
_SIZES: Final = {
    "hidden_size": "base_emb_dim",
    "num_hidden_layers": "base_num_decoder_layers",
    "num_attention_heads": "base_num_query_heads",
    "num_key_value_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "base_mlp_dim",
    "vocab_size": "vocab_size",
}
_CALL: Final = "!!python/object/apply:"
_WORDS: Final = {"true": True, "false": False, "null": None, "~": None, "": None}

# The constants of MaxText's scaling of rotary positions, which no setting changes.
_LLAMA31: Final = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def flat_yaml(text: str) -> dict[str, Any]:
    """Return the settings of a file that has one `key: value` to a line; others are skipped.

    A member of an enumeration, which PyYAML writes as a call with its value on the next line, is
    its value. Nothing is called.
    """
    settings: dict[str, Any] = {}
    last = ""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if line.startswith("- ") and str(settings.get(last, "")).startswith(_CALL):
            settings[last] = _scalar(line[2:].strip())
        elif colon and key.isidentifier():
            last = key
            settings[key] = _scalar(value.split(" #")[0].strip())
    return settings


def _scalar(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) > 1 and text[0] == text[-1] == "'":
        return text[1:-1].replace("''", "'")
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return float(text) if "." in text or "e" in text.lower() else int(text)
    except ValueError:
        return text


def is_maxtext(settings: Mapping[str, Any]) -> bool:
    """Return whether settings are MaxText's, not those of a config.json."""
    return "decoder_block" in settings and "model_type" not in settings


def from_maxtext(settings: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return keys of config.json, and whether neighbouring dimensions of a head turn together.

    The sizes of the model are left out: the tree tells them.

    Raises:
        ConfigError: the settings are of a model that no family here is; all problems are listed.
    """
    block = str(settings["decoder_block"]).rpartition(".")[2].lower()
    name, kind = str(settings.get("model_name", "")), str(settings.get("rope_type", "default"))
    llama31 = name.startswith("llama3.1") or kind.startswith("llama3.1")
    tied = bool(settings.get("logits_via_embedding"))
    gemma = block.startswith("gemma")
    problems = []
    if block not in _FAMILIES:
        problems.append(f"decoder_block {block!r}: known are {', '.join(sorted(_FAMILIES))}")
    if kind not in ("default", "None") and not llama31:
        problems.append(f"rope_type {kind!r}: known are default and llama3.1")
    if tied and bool(settings.get("normalize_embedding_logits", True)) != gemma:
        problems.append(
            "normalize_embedding_logits: with logits_via_embedding, expected true for Gemma, "
            "whose embedding has the factor in it, and false for others"
        )
    problems += [
        f"{key}: expected false" for key in ("fused_qkv", "fused_mlp") if settings.get(key)
    ]
    if problems:
        raise ConfigError(
            path=FILE,
            expected="a decoder of a family that is known here",
            found=f"{count_text(len(problems), 'setting')} of another",
            next_step="name a config.json of the model that computes the same, with --config",
            problems=problems,
        )
    theta = float(settings.get("rope_max_timescale", 10_000))
    config: dict[str, Any] = {
        "model_type": _FAMILIES[block],
        "max_position_embeddings": settings.get("max_target_length"),
        "rms_norm_eps": float(settings.get("normalization_layer_epsilon", 1e-5)),
        "rope_theta": theta,
    }
    if llama31 and settings.get("rope_use_scale", True):
        config["rope_scaling"] = dict(_LLAMA31)
    if int(settings.get("num_experts", 1)) > 1:
        config["num_experts_per_tok"] = settings["num_experts_per_tok"]
        if block == "qwen3_moe":
            config["norm_topk_prob"] = bool(settings.get("norm_topk_prob"))
    if gemma:
        config["sliding_window"] = settings["sliding_window_size"]
        config |= _gemma(settings, block, theta)
    return config, llama31


def sizes_in(settings: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that MaxText's settings say, under config.json's keys.

    With a scale for all sizes, which MaxText rounds, none are returned.
    """
    if int(settings.get("global_parameter_scale") or 1) != 1:
        return {}
    sizes = {key: settings.get(stored) for key, stored in _SIZES.items()}
    if "qwen3_moe" in str(settings["decoder_block"]):
        del sizes["intermediate_size"]  # all its layers have experts
        sizes["moe_intermediate_size"] = settings.get("base_moe_mlp_dim")
    layers = sizes["num_hidden_layers"]
    if "gemma2" in str(settings["decoder_block"]) and isinstance(layers, int):
        sizes["num_hidden_layers"] = 2 * layers  # MaxText counts pairs, of a window and without
    return {key: size for key, size in sizes.items() if isinstance(size, int)}


def _gemma(settings: Mapping[str, Any], block: str, theta: float) -> dict[str, Any]:
    """Return the keys of Gemma 2 and 3 alone."""
    size = settings["head_dim"]
    caps = {"attn_logit_softcapping": "attn_logits_soft_cap"}
    if block == "gemma2":
        caps["final_logit_softcapping"] = "final_logits_soft_cap"
        # Its attention scales nothing: the factor is in the weights, whichever it is.
        return {"query_pre_attn_scalar": size} | {
            key: settings.get(stored) or None for key, stored in caps.items()
        }
    wide = str(settings.get("model_name")) == "gemma3-27b"
    if wide:
        size = settings["base_emb_dim"] // settings["base_num_query_heads"]
    factor = float(settings.get("rope_linear_scaling_factor", 1.0))
    full: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if factor != 1.0:
        full = {"rope_type": "linear", "factor": factor, "rope_theta": theta}
    local = float(settings.get("local_rope_max_timescale") or theta)
    return {
        "query_pre_attn_scalar": size,
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }
