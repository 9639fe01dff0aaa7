"""Content of an adapter folder that `peft` loads.

Source: peft 0.21, `LoraConfig` and `save_pretrained`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final

import numpy as np

from cairn.interop.conversion.ops import Array
from cairn.interop.errors import ConversionError
from cairn.interop.weights.peft_config import PeftConfig, target_modules
from cairn.interop.weights.peft_names import AdaptedModule, Pair
from cairn.storage.safetensors.writer import TensorSource

__all__ = [
    "ADAPTER_CONFIG_FILE",
    "ADAPTER_FILE",
    "PEFT_PREFIX",
    "adapter_content",
    "array_source",
]

ADAPTER_CONFIG_FILE: Final = "adapter_config.json"
ADAPTER_FILE: Final = "adapter_model.safetensors"
PEFT_PREFIX: Final = "base_model.model."


def adapter_content(
    modules: Sequence[AdaptedModule],
    adapted: Collection[str],
    pair: Callable[[str], Pair],
    *,
    rank: int,
    alpha: float,
    task_type: str,
    base_model_name_or_path: str | None,
    path: str,
) -> tuple[dict[str, Array], dict[str, Any]]:
    """Return the tensors of a model's adapters under PEFT's names, and adapter_config.json.

    Args:
        modules: every module that can have adapters.
        adapted: paths of the kernels that have adapters.
        pair: returns A and B of the kernel with a path.
        rank: the adapters' usual rank.
        alpha: the adapters' output is scaled by alpha / rank.
        task_type: PEFT's name of the model's task.
        base_model_name_or_path: name or path of the base model, written into adapter_config.json.
        path: name of the conversion, for the error.

    Raises:
        ConversionError: some adapters have no module in the family, or PEFT can't adapt their
            module; all are listed.
    """
    covered = {kernel for module in modules for kernel in module.kernels}
    has = [module for module in modules if any(kernel in adapted for kernel in module.kernels)]
    problems = [f"{kernel}_lora_a" for kernel in adapted if kernel not in covered]
    problems += [f"{module.name}: {module.refusal}" for module in has if module.refusal]
    if problems:
        raise ConversionError(
            path=path,
            expected="adapters beside matrices that are modules of the family, which peft adapts",
            found=f"{len(problems)} that are not",
            next_step="leave these layers out by lora_pattern, or merge them: "
            "unwrap_lora_to_layers()",
            problems=problems,
        )
    tensors: dict[str, Array] = {}
    ranks, alphas = {}, {}
    for module in has:
        pairs = [pair(kernel) if kernel in adapted else None for kernel in module.kernels]
        down, up = module.to_peft(pairs)
        if down.shape[0] != rank:
            # A module of several kernels has a multiple of the rank, but the same scale.
            ranks[re.escape(module.name)] = down.shape[0]
            alphas[re.escape(module.name)] = alpha * down.shape[0] / rank
        tensors[f"{PEFT_PREFIX}{module.name}.lora_A.weight"] = down
        tensors[f"{PEFT_PREFIX}{module.name}.lora_B.weight"] = up
    names = [module.name for module in has]
    config = PeftConfig(rank, alpha, False, ranks, alphas).to_json(
        modules=target_modules(names, [m.name for m in modules if m.name not in set(names)]),
        task_type=task_type,
        base_model_name_or_path=base_model_name_or_path,
        fan_in_fan_out=any(module.inputs_first for module in has),
    )
    return tensors, config


def array_source(name: str, array: Array, *, dtype: np.dtype[Any] | None = None) -> TensorSource:
    """Return the source of a file's tensor for an array in memory.

    Args:
        name: name of the tensor.
        array: values of the tensor.
        dtype: dtype to which it is cast; None: its own.
    """
    target = array.dtype if dtype is None else dtype

    def blocks(max_bytes: int) -> Iterator[Array]:
        with np.errstate(over="ignore", invalid="ignore"):  # the writer counts them
            yield array.astype(target, copy=False)

    return TensorSource(name, tuple(array.shape), target, blocks)
