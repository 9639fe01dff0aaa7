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
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_form import GGUFContent, GGUFForm, gguf_sizes
from cairn.interop.families.gguf_names import gguf_names

__all__ = ["deepseek_gguf"]

_GATING = "expert_gating_func"
_MSCALE = "rope.scaling.yarn_log_multiplier"
_SIGMOID = 2


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
    return {
        "norm_topk_prob": bool(said.get("expert_weights_norm", False)),
        "q_lora_rank": said.get("attention.q_lora_rank"),
        "qk_nope_head_dim": data["qk_head_dim"] - data["qk_rope_head_dim"],
        "rope_parameters": rope,
        "routed_scaling_factor": float(said.get("expert_weights_scale") or 1.0),
    }


def _read_v2(content: GGUFContent, data: Mapping[str, Any]) -> dict[str, Any]:
    grouped = data["n_group"] > 1
    method = "group_limited_greedy" if grouped else "greedy"
    return _read(content, data) | {"topk_method": method}


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
            "attention.key_length_mla": "qk_head_dim",
            "attention.kv_lora_rank": "kv_lora_rank",
            "attention.value_length_mla": "v_head_dim",
            "expert_count": "n_routed_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_shared_count": "n_shared_experts",
            "expert_used_count": "num_experts_per_tok",
            "leading_dense_block_count": "first_k_dense_replace",
            "rope.dimension_count": "qk_rope_head_dim",
        },
        also_read=frozenset(
            {
                *("attention.head_count_kv", "attention.key_length", "attention.q_lora_rank"),
                *("attention.value_length", _GATING, "expert_weights_norm", _MSCALE),
                "expert_weights_scale",
            }
        ),
        read=_read if third else _read_v2,
        heads=None,
        head_dim=None,
        fits=lambda content: (content.metadata.get(_GATING, 1) == _SIGMOID) == third,
        engine=Engine(wide_heads=True),
    )
