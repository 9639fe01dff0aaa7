"""Keys of config.json about experts that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.errors import ConfigError

__all__ = [
    "DENSE_TAKEN_FOR_EXPERTS",
    "ROUTER_IS_NO_LINEAR",
    "SPARSE_KEYS",
    "dense_layers",
    "experts_of",
    "write_dense_layers",
]

SPARSE_KEYS = frozenset(
    {
        *("decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob"),
        "num_experts_per_tok",
    }
)
"""Keys about experts that Qwen's families share: key -> option."""

ROUTER_IS_NO_LINEAR: Mapping[str, str] = MappingProxyType(
    {r".*\.mlp\.(gate|router)": "a router, which is no linear layer in transformers"}
)
DENSE_TAKEN_FOR_EXPERTS: Mapping[str, str] = MappingProxyType(
    {r".*\.(gate|up|down)_proj": "peft takes this name for the experts' in this family"}
)
"""Modules that can't have adapters in PEFT: regular expression -> reason.

Source: peft 0.21, `_MOE_TARGET_MODULE_MAPPING`; transformers 5.
"""


def experts_of(config: DecoderConfig) -> ExpertsConfig:
    """Return the experts of a config whose family has them.

    Raises:
        ConfigError: the config has no experts.
    """
    if config.experts is None:
        raise ConfigError(
            path=f"{type(config).__name__}({config.model_type!r})",
            expected="experts, as every model of this family has",
            found="experts=None",
            next_step="set experts, or choose a model_type without them",
        )
    return config.experts


def dense_layers(data: Mapping[str, Any], options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the numbers of the layers without experts.

    They follow from the keys `decoder_sparse_step` and `mlp_only_layers`.
    """
    step, only = data.get("decoder_sparse_step") or 1, data.get("mlp_only_layers") or []
    numbers = range(options["num_hidden_layers"])
    return tuple(number for number in numbers if number in only or (number + 1) % step)


def write_dense_layers(experts: ExpertsConfig) -> dict[str, Any]:
    """Return the keys of config.json that name the layers without experts."""
    return {"decoder_sparse_step": 1, "mlp_only_layers": list(experts.dense_layers)}
