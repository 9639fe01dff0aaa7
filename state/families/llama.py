"""Llama 2 and 3, and what shares their form (SmolLM2, TinyLlama, ...).

Sources: transformers `LlamaConfig` and `LlamaForCausalLM`; llama.cpp's GGUF specification.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cairn.state.config import DecoderConfig, RopeConfig, inverse_frequencies, llama3_divisors
from cairn.state.conversion import (
    TRANSPOSE,
    Array,
    Chain,
    RotaryRows,
    Rule,
    RuleTable,
    expand,
)
from cairn.state.errors import ConfigError
from cairn.state.families.family import Family, GGUFForm
from cairn.state.families.hf_config import (
    activation_from_hf,
    activation_to_hf,
    refused_keys,
    required,
    rope_from_hf,
    rope_to_hf,
)

_SAME_NAME = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
_DEFAULTS: Mapping[str, Any] = {
    "attention_bias": False,
    "head_dim": None,
    "initializer_range": 0.02,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_READ_ELSEWHERE = (
    "architectures",
    "attention_dropout",
    "hidden_act",
    "model_type",
    "pretraining_tp",
    "quantization_config",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
_KNOWN_KEYS = frozenset({*_SAME_NAME, *_DEFAULTS, *_READ_ELSEWHERE})
_CARRIED = frozenset({"attention_dropout", "pretraining_tp"})
"""Keys that are read only to be refused, and given back with the values that are not."""
_DROPPED = frozenset({"dtype", "torch_dtype", "_name_or_path"})
"""Keys of config.json that say something of a copy on disk, not of the model."""


def read_options(data: Mapping[str, Any]) -> dict[str, Any]:
    """config.json -> options of the decoder.

    Raises:
        ConfigError: keys are missing, or ask for what the decoder does not do.
    """
    where = f"config.json of a {data.get('model_type')!r} model"
    refused = [
        f"{key}={data[key]!r} ({why})"
        for key, allowed, why in (
            ("attention_dropout", (0, 0.0, None), "the decoder has no dropout"),
            ("pretraining_tp", (1, None), "only changes the order of sums; set it to 1"),
            ("quantization_config", (None,), "dequantize the weights first"),
        )
        if key in data and data[key] not in allowed
    ]
    refused += refused_keys(data, _KNOWN_KEYS, FAMILY.architecture)
    if refused:
        raise ConfigError(
            path=where,
            expected="a plain Llama",
            found="; ".join(refused),
            next_step="pass config_kwargs to override keys, if the weights allow it (None for no "
            "such key); what the architecture is, config_kwargs can't change",
        )
    options = required(data, _SAME_NAME, where)
    for key, default in _DEFAULTS.items():
        value = data.get(key)
        options[key] = default if value is None else value
    options["attention_out_bias"] = options["attention_bias"]
    options["hidden_act"] = activation_from_hf(data.get("hidden_act", "silu"), where)
    options["rope"] = rope_from_hf(data, where)
    options["model_type"] = data["model_type"]
    dropped = (_KNOWN_KEYS - _CARRIED) | _DROPPED
    options["hf_extra"] = {k: v for k, v in data.items() if k not in dropped and v is not None}
    return options


def write_config(config: DecoderConfig) -> dict[str, Any]:
    """Options of the decoder -> config.json."""
    data = dict(config.hf_extra)
    data |= {key: getattr(config, key) for key in (*_SAME_NAME, *_DEFAULTS)}
    data |= rope_to_hf(config.rope)
    data["hidden_act"] = activation_to_hf(config.hidden_act)
    data["model_type"] = config.model_type
    data["architectures"] = [FAMILY.architecture]
    return data


def rules(config: DecoderConfig) -> RuleTable:
    """Our leaves <-> transformers' tensor names."""
    ours, theirs = "model/layers/{layer}/", "model.layers.{layer}."
    table = [Rule.one("model/embed_tokens/embedding", "model.embed_tokens.weight")]
    attention = [f"self_attn/{name}_proj" for name in "qkvo"]
    for name in (*attention, "mlp/gate_proj", "mlp/up_proj", "mlp/down_proj"):
        dotted = name.replace("/", ".")
        table.append(Rule.one(f"{ours}{name}/kernel", f"{theirs}{dotted}.weight", TRANSPOSE))
        if _has_bias(config, name):
            table.append(Rule.one(f"{ours}{name}/bias", f"{theirs}{dotted}.bias"))
    table += [
        Rule.one(f"{ours}input_layernorm/scale", f"{theirs}input_layernorm.weight"),
        Rule.one(
            f"{ours}post_attention_layernorm/scale", f"{theirs}post_attention_layernorm.weight"
        ),
        Rule.one("model/norm/scale", "model.norm.weight"),
    ]
    tolerated = [r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"]
    aliases = {}
    if config.tie_word_embeddings:
        tolerated.append(r"lm_head\.weight")
        aliases["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        table.append(Rule.one("lm_head/kernel", "lm_head.weight", TRANSPOSE))
    return RuleTable(expand(table, layer=config.num_hidden_layers), tuple(tolerated), aliases)


def _has_bias(config: DecoderConfig, name: str) -> bool:
    if name.startswith("mlp/"):
        return config.mlp_bias
    return config.attention_out_bias if name == "self_attn/o_proj" else config.attention_bias


def gguf_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """GGUF metadata -> config.json.

    The keys are those of the architecture ("block_count", ...), and of `GGUFFile.config`:
    "vocab_size" (rows of the embedding), "tied" (no "output.weight") and "attention_bias".

    Raises:
        ConfigError: a key is missing, or asks for what the decoder does not do.
    """
    where = "metadata of a 'llama' GGUF"
    names = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "vocab_size": "vocab_size",
    }
    found = required(metadata, tuple(names), where)
    data = {names[key]: value for key, value in found.items()}
    heads = data["num_attention_heads"]
    head_dim = metadata.get("attention.key_length", metadata.get("rope.dimension_count"))
    scaling = metadata.get("rope.scaling.type", "none")
    refused = [
        f"{key}={metadata[key]!r}"
        for key, wanted in (
            ("rope.dimension_count", head_dim),
            ("attention.value_length", head_dim),
        )
        if metadata.get(key, wanted) != wanted
    ]
    refused += [f"{key}={metadata[key]!r}" for key in ("expert_count",) if metadata.get(key)]
    if scaling not in ("none", "linear"):
        refused.append(f"rope.scaling.type={scaling!r}")
    theta = float(metadata.get("rope.freq_base", 10000.0))
    divisors = metadata.get("rope_divisors")
    llama3 = None if divisors is None else _llama3_rope(divisors, theta)
    if divisors is not None and llama3 is None:
        refused.append("rope_freqs.weight (not Llama 3's)")
    if refused:
        raise ConfigError(
            path=where,
            expected="a dense Llama with full rotary heads",
            found="; ".join(refused),
            next_step="use the model's safetensors instead",
        )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling == "linear":
        rope |= {"rope_type": "linear", "factor": float(metadata.get("rope.scaling.factor", 1.0))}
    if llama3 is not None:
        rope = rope_to_hf(llama3)["rope_parameters"]
    data |= {
        "model_type": "llama",
        "head_dim": head_dim or data["hidden_size"] // heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "rope_parameters": rope,
        "tie_word_embeddings": bool(metadata["tied"]),
        "attention_bias": bool(metadata["attention_bias"]),
    }
    return data


def _llama3_rope(divisors: Array, theta: float) -> RopeConfig | None:
    """Llama 3's scaling, which a GGUF keeps only as the numbers that come out of it.

    Only the factor differs between the models of that generation; it divides the longest wave.
    """
    rope = RopeConfig(
        theta=theta,
        scaling="llama3",
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    kept = inverse_frequencies(RopeConfig(theta=theta), 2 * divisors.size)
    same = np.allclose(llama3_divisors(rope, kept), divisors, rtol=1e-4)
    return rope if same else None


def gguf_rules(config: DecoderConfig) -> RuleTable:
    """Our leaves <-> llama.cpp's tensor names; NumPy shapes, [out, in]."""
    ours, theirs = "model/layers/{layer}/", "blk.{layer}."
    rotary = {"q": config.num_attention_heads, "k": config.kv_heads}
    table = [Rule.one("model/embed_tokens/embedding", "token_embd.weight")]
    for name, tensor in (
        ("self_attn/q_proj", "attn_q"),
        ("self_attn/k_proj", "attn_k"),
        ("self_attn/v_proj", "attn_v"),
        ("self_attn/o_proj", "attn_output"),
        ("mlp/gate_proj", "ffn_gate"),
        ("mlp/up_proj", "ffn_up"),
        ("mlp/down_proj", "ffn_down"),
    ):
        heads = rotary.get(tensor.removeprefix("attn_"))
        rows = (RotaryRows(heads),) if heads else ()
        kernel = Chain((*rows, TRANSPOSE))
        table.append(Rule.one(f"{ours}{name}/kernel", f"{theirs}{tensor}.weight", kernel))
        if _has_bias(config, name):
            table.append(Rule.one(f"{ours}{name}/bias", f"{theirs}{tensor}.bias", Chain(rows)))
    table += [
        Rule.one(f"{ours}input_layernorm/scale", f"{theirs}attn_norm.weight"),
        Rule.one(f"{ours}post_attention_layernorm/scale", f"{theirs}ffn_norm.weight"),
        Rule.one("model/norm/scale", "output_norm.weight"),
    ]
    if not config.tie_word_embeddings:
        table.append(Rule.one("lm_head/kernel", "output.weight", TRANSPOSE))
    tolerated = (r"rope_freqs\.weight",)
    return RuleTable(expand(table, layer=config.num_hidden_layers), tolerated)


FAMILY = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    known_keys=_KNOWN_KEYS,
    read_options=read_options,
    write_config=write_config,
    rules=rules,
    gguf=GGUFForm(config=gguf_config, rules=gguf_rules),
)
