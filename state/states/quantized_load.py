"""Quantization of a model while it is loaded: a few weights at a time, on their devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flax import nnx

from cairn.interop.errors import ArgumentError
from cairn.state.adapters.layers import layers_to_quantize
from cairn.state.adapters.quantization_request import QuantizationRequest, filled, quantize_layer
from cairn.state.paths import named_leaves
from cairn.state.states.checkpoint import StoredCheckpoint

__all__ = [
    "GROUP_BYTES",
    "fill_model",
    "quantizes",
    "refuse_float_optimizer",
]

GROUP_BYTES = 256 << 20
"""Maximum bytes of floating kernels on a device that are loaded together to be quantized. A larger
kernel is loaded alone."""


def quantizes(checkpoint: StoredCheckpoint, request: QuantizationRequest) -> bool:
    """Return whether a load of this checkpoint must quantize weights.

    Raises:
        ArgumentError: if the checkpoint is quantized with other settings than the request's.
    """
    stored = (checkpoint.meta.get("module") or {}).get("quantization")
    return request.check_stored(stored, path=checkpoint.uri)


def refuse_float_optimizer(checkpoint: StoredCheckpoint, model: Any) -> None:
    """Check that the stored optimizer state is not of weights that the load will quantize.

    Raises:
        ArgumentError: if the model has no adapters: then the optimizer state is of its weights.
    """
    if getattr(model, "lora", None) is None:
        raise ArgumentError(
            path="quantization_method",
            expected="optimizer='skip' with it",
            found=f"optimizer='require', and an optimizer state of floating weights in "
            f"{checkpoint.uri}",
            next_step="quantized weights are not trained: add adapters, and an optimizer for them",
        )


def fill_model(
    checkpoint: StoredCheckpoint, model: Any, request: QuantizationRequest, *, cast: bool
) -> Any:
    """Return a model with the arrays of a checkpoint, quantized if the request says so.

    Args:
        checkpoint: the checkpoint; call its `check` before.
        model: the model without arrays; its leaves have shardings.
        request: what to quantize. Floating kernels are read in groups of at most `GROUP_BYTES` on
            any device, and each is freed once it is quantized.
        cast: whether floating leaves may have another floating dtype than the stored one.
    """
    graphdef, target = nnx.split(model)
    if not quantizes(checkpoint, request):
        return nnx.merge(graphdef, checkpoint.restore(checkpoint.model_item, target, cast=cast))
    settings = request.settings
    layers = layers_to_quantize(model, settings)
    leaves = {named.path: named.leaf for named in named_leaves(target)}
    device_bytes = {}
    for path in layers:
        leaf = leaves[path]
        shape = leaf.sharding.shard_shape(leaf.shape)
        device_bytes[path] = math.prod(shape) * int(leaf.dtype.itemsize)
    for group in _groups(device_bytes, GROUP_BYTES):
        kernels = checkpoint.restore_some(checkpoint.model_item, target, group, cast=cast)
        for path in group:
            quantize_layer(layers[path], kernels.pop(path), settings)
    others = [path for path in leaves if path not in layers]
    restored = checkpoint.restore_some(checkpoint.model_item, target, others, cast=cast)
    return filled(model, restored, settings)


def _groups(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide names into groups of at most `limit` bytes; a larger one is alone in its group."""
    groups: list[list[str]] = []
    filled = limit
    for name, size in sizes.items():
        if filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups
