"""A family's GGUF file: its metadata as a config.json, and what llama.cpp calls its tensors.

JAX-free. Source: llama.cpp's GGUF specification.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.state.config import DecoderConfig, RopeConfig, inverse_frequencies, llama3_divisors
from cairn.state.conversion import TRANSPOSE, Array, Chain, Op, RotaryRows, RuleTable
from cairn.state.errors import ConfigError
from cairn.state.families.hf_config import required, rope_to_hf
from cairn.state.families.names import Names

__all__ = ["GGUFForm", "gguf_config", "gguf_names"]


@dataclass(frozen=True)
class GGUFForm:
    """How a family lies in a GGUF file whose architecture is its `model_type`.

    Attributes:
        config: metadata, without the architecture's prefix -> config.json.
        names: what llama.cpp calls its layers; NumPy shapes, [out, in].
    """

    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Names

    def rules(self, config: DecoderConfig) -> RuleTable:
        """The table against GGUF's tensor names."""
        return self.names.rules(config)


def gguf_names(**changes: Any) -> Names:
    """llama.cpp's names of a decoder's layers; it turns neighbouring dimensions of a head.

    Args:
        **changes: other attributes of `Names`.
    """
    return Names(
        **{
            "top": {
                "model/embed_tokens": "token_embd",
                "model/norm": "output_norm",
                "lm_head": "output",
            },
            "layer": "blk.{layer}",
            "parts": {
                "self_attn/q_proj": "attn_q",
                "self_attn/k_proj": "attn_k",
                "self_attn/v_proj": "attn_v",
                "self_attn/o_proj": "attn_output",
                "mlp/gate_proj": "ffn_gate",
                "mlp/up_proj": "ffn_up",
                "mlp/down_proj": "ffn_down",
                "input_layernorm": "attn_norm",
                "post_attention_layernorm": "ffn_norm",
            },
            "ops": {"self_attn/q_proj": _rotary_queries, "self_attn/k_proj": _rotary_keys},
            "tolerated": (r"rope_freqs\.weight",),
            **changes,
        }
    )


def _rotary_queries(config: DecoderConfig, leaf: str) -> Op:
    return _rotary(config.num_attention_heads, leaf)


def _rotary_keys(config: DecoderConfig, leaf: str) -> Op:
    return _rotary(config.kv_heads, leaf)


def _rotary(heads: int, leaf: str) -> Op:
    rows = RotaryRows(heads)
    return rows if leaf == "bias" else Chain((rows, TRANSPOSE))


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
