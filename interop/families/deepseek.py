"""Config keys and layer names of DeepSeek V2 and V3: latent attention, grouped experts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.config.frequencies import yarn_mscale
from cairn.interop.config.latent_attention import LatentAttentionConfig
from cairn.interop.conversion.ops import TRANSPOSE, Chain, Op, RotaryRows
from cairn.interop.errors import ConfigError
from cairn.interop.families.experts import DENSE_TAKEN_FOR_EXPERTS, experts_of
from cairn.interop.families.hf_config import rope_from_hf
from cairn.interop.families.names import Names

__all__ = [
    "EXPERT_LAYERS",
    "LATENT_KEYS",
    "TURNING_OPS",
    "deepseek_names",
    "read_experts",
    "read_latent",
    "without_further_tokens",
    "write_experts",
    "write_latent",
]

LATENT_KEYS = frozenset(
    {
        *("auto_map", "first_k_dense_replace", "head_dim", "kv_lora_rank", "moe_intermediate_size"),
        *("n_group", "n_routed_experts", "n_shared_experts", "num_experts_per_tok", "q_lora_rank"),
        *("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "routed_scaling_factor"),
        *("topk_group", "v_head_dim", "num_local_experts"),
    }
)
"""Keys that both versions read; `auto_map` names code that transformers has built in."""


def read_latent(data: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of latent attention and its rotary positions.

    Args:
        data: content of config.json.
        options: options read so far.

    Raises:
        ConfigError: some sizes contradict those from which they follow.
    """
    latent = LatentAttentionConfig(
        query_rank=data.get("q_lora_rank", 1536),
        key_value_rank=data.get("kv_lora_rank", 512),
        content_dim=data.get("qk_nope_head_dim", 128),
        rotary_dim=data.get("qk_rope_head_dim", 64),
        value_dim=data.get("v_head_dim", 128),
    )
    follow = {
        "head_dim": latent.rotary_dim,
        "num_key_value_heads": options["num_attention_heads"],
        "num_local_experts": data.get("n_routed_experts"),
        "qk_head_dim": latent.key_dim,
    }
    wrong = [f"{key}={data[key]!r}" for key, size in follow.items() if data.get(key, size) != size]
    if wrong:
        raise ConfigError(
            path=f"config.json of a {data.get('model_type')!r} model",
            expected=", ".join(f"{key} {size}" for key, size in follow.items()),
            found=", ".join(wrong),
            next_step="leave them out: they follow from qk_rope_head_dim, num_attention_heads, "
            "n_routed_experts and qk_nope_head_dim",
        )
    rope = rope_from_hf(data, f"config.json of a {data.get('model_type')!r} model")
    scale = None
    if rope.scaling == "yarn" and rope.mscale_all_dim:
        scale = latent.key_dim**-0.5 * yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return {
        "attention_out_bias": options["attention_bias"],
        "attention_scale": scale,
        "latent": latent,
        "num_key_value_heads": options["num_attention_heads"],
    }


def read_experts(
    data: Mapping[str, Any],
    options: Mapping[str, Any],
    usual: Mapping[str, int],
    *,
    first_dense: int | None,
    **choices: Any,
) -> dict[str, Any]:
    """Return the option `experts`.

    Args:
        data: content of config.json.
        options: options read so far.
        usual: keys -> their values if they are absent.
        first_dense: number of layers at the beginning without experts.
        **choices: further arguments of `ExpertsConfig`.
    """
    settings = {key: value if data.get(key) is None else data[key] for key, value in usual.items()}
    width, shared = settings["moe_intermediate_size"], settings["n_shared_experts"]
    experts = ExpertsConfig(
        count=settings["n_routed_experts"],
        per_token=settings["num_experts_per_tok"],
        intermediate_size=width,
        shared_size=shared * width if shared else None,
        groups=settings["n_group"],
        groups_per_token=settings["topk_group"],
        dense_layers=tuple(range(min(first_dense or 0, options["num_hidden_layers"]))),
        **choices,
    )
    return {"experts": experts}


def write_experts(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of config.json that describe the experts.

    Raises:
        ConfigError: the config has no experts.
    """
    experts = experts_of(config)
    return {
        "first_k_dense_replace": len(experts.dense_layers),
        "moe_intermediate_size": experts.intermediate_size,
        "n_group": experts.groups,
        "n_routed_experts": experts.count,
        "n_shared_experts": (experts.shared_size or 0) // experts.intermediate_size,
        "norm_topk_prob": experts.normalize,
        "num_experts_per_tok": experts.per_token,
        "routed_scaling_factor": experts.scale,
        "topk_group": experts.groups_per_token,
    }


def write_latent(config: DecoderConfig) -> dict[str, Any]:
    """Return the keys of config.json that describe latent attention and the experts.

    Raises:
        ConfigError: the config has no latent attention, or no experts.
    """
    latent = config.latent
    if latent is None:
        raise ConfigError(
            path=f"{type(config).__name__}({config.model_type!r})",
            expected="latent attention, as every model of this family has",
            found="latent=None",
            next_step="set latent, or choose a model_type without it",
        )
    return write_experts(config) | {
        "kv_lora_rank": latent.key_value_rank,
        "q_lora_rank": latent.query_rank,
        "qk_nope_head_dim": latent.content_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
    }


def _turning_queries(config: DecoderConfig, leaf: str) -> Op:
    return _turning(config, leaf, config.num_attention_heads, "content_dim")


def _turning(config: DecoderConfig, leaf: str, heads: int, start: str) -> Op:
    rows = RotaryRows(heads, 0 if config.latent is None else getattr(config.latent, start))
    return rows if leaf == "bias" else Chain((rows, TRANSPOSE))


TURNING_OPS: Mapping[str, Callable[[DecoderConfig, str], Op]] = MappingProxyType(
    {
        "self_attn/q_proj": _turning_queries,
        "self_attn/q_b_proj": _turning_queries,
        "self_attn/kv_a_proj": lambda config, leaf: _turning(config, leaf, 1, "key_value_rank"),
    }
)
"""Layer path -> operation that reorders the rows of queries and of the shared key.

The files are for code that rotates neighbouring dimensions as pairs.
"""

EXPERT_LAYERS: Mapping[str, str] = MappingProxyType(
    {
        "mlp/router": "mlp.gate",
        "mlp/correction": "mlp.gate.e_score_correction_bias",
        **{
            f"mlp/shared/{name}": f"mlp.shared_experts.{name}"
            for name in ("gate_proj", "up_proj", "down_proj")
        },
    }
)
"""Paths of the experts' layers in a block -> their names in files."""

_OURS = Names(
    layer_names={
        "self_attn/q_a_norm": "self_attn.q_a_layernorm",
        "self_attn/kv_a_proj": "self_attn.kv_a_proj_with_mqa",
        "self_attn/kv_a_norm": "self_attn.kv_a_layernorm",
        **EXPERT_LAYERS,
    },
    ops=TURNING_OPS,
    no_adapters=DENSE_TAKEN_FOR_EXPERTS,
)


def deepseek_names(config: DecoderConfig) -> Names:
    """Return the layers' names; tensors of layers that predict further tokens are tolerated."""
    return without_further_tokens(_OURS, config)


def without_further_tokens(names: Names, config: DecoderConfig, usual: int = 1) -> Names:
    """Return `names`, tolerating tensors of layers that predict further tokens.

    Those layers' numbers are `num_hidden_layers` and above.

    Args:
        names: names of the layers.
        config: config of the model.
        usual: number of those layers if the config does not say it.
    """
    last = config.num_hidden_layers
    extra = int(config.hf_extra.get("num_nextn_predict_layers") or usual)
    if not extra:
        return names
    start = re.escape(names.layer.partition("{layer}")[0])
    numbers = "|".join(map(str, range(last, last + extra)))
    return dataclasses.replace(names, tolerated=(*names.tolerated, rf"{start}({numbers})\..*"))
