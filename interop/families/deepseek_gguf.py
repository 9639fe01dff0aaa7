"""GGUF files of DeepSeek V2 and V3, which have one architecture there.

Only files are read that store keys and values by head and have the experts' groups. Older files
lack the groups, without which the model can't be computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.latent_attention import LatentAttentionConfig
from cairn.interop.conversion.ops import Array, Op, Shape
from cairn.interop.conversion.rules import Rule
from cairn.interop.errors import ConfigError
from cairn.interop.families.deepseek import TURNING_OPS
from cairn.interop.families.gguf_engine import Engine, no_gguf_file
from cairn.interop.families.gguf_experts import (
    EXPERT_GATING,
    EXPERT_KEYS,
    EXPERT_SIZES,
    SIGMOID,
    SOFTMAX,
    expert_problems,
    read_gguf_experts,
    write_gguf_experts,
)
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import gguf_names

__all__ = ["deepseek_gguf"]

_MSCALE = "rope.scaling.yarn_log_multiplier"
_LATENT_NORM_EPSILON = 1e-6
"""Of the norms of latents, in transformers; llama.cpp has one epsilon for all norms."""


@dataclass(frozen=True)
class KeysAndValues(Op):
    """Kernel [in, out] from keys [heads, in, content] and values [heads, value, in].

    The outputs of the kernel are, for each head, the key's content and then the value.
    """

    content: int
    value: int

    def from_hf(self, tensors: Sequence[Array]) -> list[Array]:
        """Return the kernel, made from keys and values."""
        keys, values = tensors
        joined = np.concatenate([np.swapaxes(keys, 1, 2), values], axis=1)
        return [joined.reshape(-1, joined.shape[-1]).T]

    def to_hf(self, leaves: Sequence[Array]) -> list[Array]:
        """Return keys and values, made from the kernel."""
        (kernel,) = leaves
        joined = kernel.T.reshape(-1, self.content + self.value, kernel.shape[0])
        keys, values = np.split(joined, [self.content], axis=1)
        return [np.swapaxes(keys, 1, 2), values]

    def leaf_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shape of the kernel."""
        keys, values = shapes
        heads, width = keys[0], keys[1] if len(keys) == 3 else 0
        expected = [(heads, width, self.content), (heads, self.value, width)]
        if [keys, values] != expected:
            raise ValueError(f"shapes {expected}, found {list(shapes)}")
        return [(width, heads * (self.content + self.value))]

    def tensor_shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return the shapes of keys and values."""
        ((width, out),) = shapes
        heads = out // (self.content + self.value)
        return [(heads, width, self.content), (heads, self.value, width)]


def _keys_and_values(config: DecoderConfig, block: str, prefix: str) -> list[Rule]:
    latent: LatentAttentionConfig | None = config.latent
    op: Op = KeysAndValues(*((latent.content_dim, latent.value_dim) if latent else (0, 0)))
    names = (f"{prefix}.attn_k_b.weight", f"{prefix}.attn_v_b.weight")
    return [Rule((f"{block}/self_attn/kv_b_proj/kernel",), names, op)]


_NAMES = gguf_names(
    layer_names={
        "self_attn/q_a_proj": "attn_q_a",
        "self_attn/q_a_norm": "attn_q_a_norm",
        "self_attn/q_b_proj": "attn_q_b",
        "self_attn/kv_a_proj": "attn_kv_a_mqa",
        "self_attn/kv_a_norm": "attn_kv_a_norm",
    },
    ops=TURNING_OPS,
    special=_keys_and_values,
    special_layers=frozenset({"self_attn/kv_b_proj"}),
)


def _read(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    said = content.metadata
    rope = dict(data["rope_parameters"])
    if rope["rope_type"] == "yarn":
        if _MSCALE not in said:
            raise ConfigError(
                path="metadata of a 'deepseek2' GGUF",
                expected=f"{_MSCALE}, as every model with YaRN has",
                found="none",
                next_step="convert it with a newer llama.cpp, or use the model's safetensors",
            )
        # The key is a tenth of `mscale_all_dim`; `mscale` is the same in all published models.
        scale = round(float(said[_MSCALE]) * 10, 6)
        rope |= {"mscale": scale, "mscale_all_dim": scale}
    return read_gguf_experts(said) | {
        "q_lora_rank": said.get("attention.q_lora_rank"),
        "qk_nope_head_dim": data["qk_head_dim"] - data["qk_rope_head_dim"],
        "rope_parameters": rope,
    }


def _read_v2(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    grouped = data["n_group"] > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return _read(content, data) | {"topk_method": method}


def _latent(config: DecoderConfig) -> LatentAttentionConfig:
    if config.latent is None:
        raise no_gguf_file(config, "latent attention", "latent=None")
    return config.latent


def _write(config: DecoderConfig, said: Mapping[str, Any]) -> dict[str, Any]:
    latent, rope = _latent(config), config.rope
    # llama.cpp attends to the latents themselves, as if they were the keys and values of one head.
    metadata = write_gguf_experts(config) | {
        "attention.head_count_kv": 1,
        "attention.key_length": latent.key_value_rank + latent.rotary_dim,
        "attention.key_length_mla": latent.key_dim,
        "attention.value_length": latent.key_value_rank,
    }
    if latent.query_rank is not None:
        metadata["attention.q_lora_rank"] = latent.query_rank
    if not metadata["expert_weights_norm"]:
        del metadata["expert_weights_norm"]
    if rope is not None and rope.mscale_all_dim is not None:
        metadata[_MSCALE] = 0.1 * rope.mscale_all_dim
    return metadata


def _problems(config: DecoderConfig) -> list[str]:
    latent, rope, layers = _latent(config), config.rope, config.num_hidden_layers
    problems = expert_problems(config)
    if not np.isclose(config.rms_norm_eps, _LATENT_NORM_EPSILON, rtol=1e-6, atol=0):
        problems.append(
            f"rms_norm_eps={config.rms_norm_eps:g} (only 1e-06, that of the latents' norms: all "
            "norms have one)"
        )
    # llama.cpp takes models of these sizes for V2-Lite and the like, which have no such latents.
    lite = layers in (26, 27) or (layers == 48 and config.vocab_size == 128256)
    if lite != (latent.query_rank is None):
        problems.append(
            f"q_lora_rank={latent.query_rank} of {layers} layers (None only of 26 or 27 layers)"
        )
    if rope is not None and rope.scaling == "linear" and rope.factor != 1:
        problems.append(f"linear scaling by {rope.factor:g} (attention is scaled as for YaRN)")
    if rope is not None and rope.scaling == "yarn":
        both = rope.mscale, rope.mscale_all_dim
        if not rope.mscale_all_dim or both[0] != both[1]:
            problems.append(
                f"YaRN with mscale={both[0]}, mscale_all_dim={both[1]} (one number is taken for "
                "both)"
            )
    return problems


def deepseek_gguf(version: int) -> GGUFForm:
    """Return the GGUF form of DeepSeek V2 or V3 (`version`).

    V3 chooses experts by sigmoids, V2 by a softmax.
    """
    third = version == 3
    return GGUFForm(
        "deepseek2",
        _NAMES,
        sizes={
            **gguf_sizes(),
            **EXPERT_SIZES,
            "attention.key_length_mla": "qk_head_dim",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.value_length_mla": "v_head_dim",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        also_read=EXPERT_KEYS
        | {
            *("attention.head_count_kv", "attention.key_length", "attention.q_lora_rank"),
            *("attention.value_length", _MSCALE),
        },
        read=_read if third else _read_v2,
        write=_write,
        heads=None,
        head_dim=None,
        fits=lambda content: (content.metadata.get(EXPERT_GATING, SOFTMAX) == SIGMOID) == third,
        engine=Engine(
            {"attention_bias": (False,), "mlp_bias": (False,)},
            wide_heads=True,
            problems=_problems,
        ),
    )
