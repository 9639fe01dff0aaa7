"""Reader and writer of PEFT's adapter_config.json; the reader checks every key.

Source: peft 0.21, `LoraConfig`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cairn.interop.errors import ConversionError
from cairn.interop.families.key_kinds import is_number

__all__ = ["PeftConfig", "target_modules"]

_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "lora_bias": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Keys that may add more to a model than A and B beside a weight -> values that add nothing."""

_PLAIN = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config"),
        *("ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out"),
        *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
        *("loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config"),
        *("megatron_core", "peft_type", "peft_version", "qalora_group_size", "r"),
        *("rank_pattern", "revision", "runtime_config", "target_modules", "task_type"),
        "use_rslora",
    }
)
"""Keys that are read, or that describe training or placement, which the tensors show too."""

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base weights as they are."""


@dataclass(frozen=True)
class PeftConfig:
    """Settings of LoRA in an adapter_config.json.

    Attributes:
        rank: usual rank, `r`.
        alpha: usual `lora_alpha`.
        rsquare: `use_rslora`: the scale is alpha / sqrt(rank), not alpha / rank.
        rank_pattern: regular expressions of module names -> their ranks, if not the usual one.
        alpha_pattern: regular expressions of module names -> their alphas, if not the usual one.
    """

    rank: int
    alpha: float
    rsquare: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, data: Mapping[str, Any], *, path: str) -> PeftConfig:
        """Return the settings of a parsed adapter_config.json.

        Raises:
            ConversionError: the adapter is not LoRA, or has more than A and B beside weights; all
                problems are listed.
        """
        problems = [
            f"{key}={data[key]!r}"
            for key, plain in _REFUSED.items()
            if key in data
            and not any(data[key] is pattern or data[key] == pattern for pattern in plain)
        ]
        problems += [
            f"{key}={value!r}, which is unknown"
            for key, value in sorted(data.items())
            if value and key not in _PLAIN | _REFUSED.keys()
        ]
        start = data.get("init_lora_weights", True)
        if start not in _PLAIN_STARTS:
            problems.append(f"init_lora_weights={start!r}, which changes the base weights")
        if data.get("peft_type") != "LORA":
            problems.append(f"peft_type={data.get('peft_type')!r}")
        rank, alpha = data.get("r", 8), data.get("lora_alpha", 8)
        patterns = [data.get(f"{name}_pattern") or {} for name in ("rank", "alpha")]
        if not all(isinstance(pattern, dict) for pattern in patterns):
            problems.append("rank_pattern or alpha_pattern, which are no objects")
        else:
            ranks, alphas = [rank, *patterns[0].values()], [alpha, *patterns[1].values()]
            problems += [f"rank {n!r}" for n in ranks if not is_number(n) or n != int(n) or n < 1]
            problems += [f"alpha {n!r}" for n in alphas if not is_number(n) or n <= 0]
        if problems:
            raise ConversionError(
                path=path,
                expected="plain LoRA: A and B beside weights, nothing else",
                found=f"{len(problems)} that it is not",
                next_step="merge the adapter with peft (merge_and_unload), and load the result",
                problems=problems,
            )
        return cls(int(rank), float(alpha), bool(data.get("use_rslora")), *patterns)

    def scale(self, module: str, rank: int) -> float:
        """Return the factor on the output of a module's adapter, whose rank is `rank`."""
        alpha = float(_matching(self.alpha_pattern, module, self.alpha))
        return alpha / (math.sqrt(rank) if self.rsquare else rank)

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's adapter."""
        return int(_matching(self.rank_pattern, module, self.rank))

    def to_json(
        self,
        *,
        modules: list[str],
        task_type: str,
        base_model_name_or_path: str | None,
        fan_in_fan_out: bool,
    ) -> dict[str, Any]:
        """Return the content of adapter_config.json, without nulls."""
        data: dict[str, Any] = {
            "alpha_pattern": {name: _plain(value) for name, value in self.alpha_pattern.items()},
            "bias": "none",
            "fan_in_fan_out": fan_in_fan_out,
            "inference_mode": True,
            "init_lora_weights": True,
            "lora_alpha": _plain(self.alpha),
            "lora_dropout": 0.0,
            "peft_type": "LORA",
            "r": self.rank,
            "rank_pattern": dict(self.rank_pattern),
            "target_modules": modules,
            "task_type": task_type,
            "use_dora": False,
            "use_rslora": self.rsquare,
        }
        if base_model_name_or_path is not None:
            data["base_model_name_or_path"] = base_model_name_or_path
        return data


def target_modules(adapted: list[str], others: list[str]) -> list[str]:
    """Return the `target_modules` that make PEFT adapt these modules and no others.

    Args:
        adapted: full names of the modules with adapters.
        others: full names of the modules without adapters.

    Returns:
        Last parts of names ("q_proj") where all modules of that name have adapters; else full
        names.
    """
    spared = {name.rpartition(".")[2] for name in others}
    last = [name.rpartition(".")[2] for name in adapted]
    short = {end if end not in spared else name for name, end in zip(adapted, last, strict=True)}
    return sorted(short)


def _matching(pattern: Mapping[str, Any], module: str, usual: Any) -> Any:
    """Return the first value whose key matches the end of a module's name; else `usual`."""
    matches = (value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(matches, usual)


def _plain(value: float) -> int | float:
    """Return a whole number as an int, since PEFT declares alpha as int."""
    return int(value) if value == int(value) else value
