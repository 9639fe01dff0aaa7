"""Metadata of GGUF files about experts as DeepSeek and GLM choose them: in groups, and shared ones.

Source: llama.cpp's converter, and its `build_moe_ffn`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.families.experts import experts_of

__all__ = [
    "EXPERT_GATING",
    "EXPERT_KEYS",
    "EXPERT_SIZES",
    "SIGMOID",
    "SOFTMAX",
    "expert_problems",
    "read_gguf_experts",
    "write_gguf_experts",
]

EXPERT_GATING = "expert_gating_func"
SOFTMAX, SIGMOID = 1, 2
"""Values of `EXPERT_GATING`."""
_SCALE, _NORM = "expert_weights_scale", "expert_weights_norm"

EXPERT_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "expert_count": "n_routed_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "expert_shared_count": "n_shared_experts",
        "expert_used_count": "num_experts_per_tok",
        "leading_dense_block_count": "first_k_dense_replace",
    }
)
"""Required metadata keys -> keys of config.json."""

EXPERT_KEYS = frozenset({EXPERT_GATING, _SCALE, _NORM})
"""Further metadata keys, which `read_gguf_experts` reads."""


def read_gguf_experts(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json that say how the experts' outputs are weighted."""
    return {
        "norm_topk_prob": bool(metadata.get(_NORM, False)),
        "routed_scaling_factor": float(metadata.get(_SCALE) or 1.0),
    }


def write_gguf_experts(config: DecoderConfig) -> dict[str, Any]:
    """Return the metadata of `EXPERT_KEYS`.

    Raises:
        ConfigError: the config has no experts.
    """
    experts = experts_of(config)
    return {
        EXPERT_GATING: SIGMOID if experts.score == "sigmoid" else SOFTMAX,
        _NORM: experts.normalize,
        _SCALE: float(experts.scale),
    }


def expert_problems(config: DecoderConfig) -> list[str]:
    """Return a line for each choice of experts that llama.cpp makes otherwise or can't make.

    Raises:
        ConfigError: the config has no experts.
    """
    experts = experts_of(config)
    groups, chosen, count = experts.groups, experts.groups_per_token, experts.count
    problems = []
    if groups >= count or (groups > 1 and chosen >= groups):
        problems.append(
            f"{chosen} of {groups} groups of {count} experts (as many groups as there are, or as "
            "there are experts, end the process)"
        )
    if groups > 1 and experts.group_score != "top2":
        problems.append(
            f"{groups} groups of experts, chosen by their best expert (the sum of the best two "
            "is taken always)"
        )
    if experts.shared_size is None:
        problems.append("no shared expert (it is computed always)")
    return problems
