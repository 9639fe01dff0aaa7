"""Quantization while a model is loaded: the caller's request, and weights packed one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from cairn.interop.errors import ArgumentError
from cairn.interop.names import EasyDeLPlatforms, EasyDeLQuantizationMethods
from cairn.state.adapters.adapted_layers import pack_kernel
from cairn.state.adapters.quantization import QuantizationSettings
from cairn.state.paths import named_leaves

__all__ = ["DEFAULT_BLOCK_SIZE", "QuantizationRequest", "filled", "quantize_layer"]

DEFAULT_BLOCK_SIZE = 128
"""Number of inputs that share a scale, if a load does not set `quantization_block_size`."""


@dataclass(frozen=True)
class QuantizationRequest:
    """The `quantization_*` arguments of a load, checked.

    Attributes:
        method: `quantization_method`; None: quantize nothing, load weights as they are stored.
        block_size: `quantization_block_size`: inputs that share a scale, -1 for all of them.
        pattern: `quantization_pattern`, searched in the path of each layer; None for all layers.
        tensors: `quantize_tensors`; False says explicitly that nothing is quantized, and allows no
            method.
        platform: `quantization_platform`: "jax", or the platform of the devices loaded onto. The
            quantized values do not depend on it.

    Raises:
        ArgumentError: if the method is unknown, or an argument contradicts another; names both.
    """

    method: EasyDeLQuantizationMethods | str | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    pattern: str | None = None
    tensors: bool = True
    platform: EasyDeLPlatforms | str | None = None

    def __post_init__(self) -> None:
        if self.method is None:
            without = {
                "quantization_block_size": (self.block_size, DEFAULT_BLOCK_SIZE),
                "quantization_pattern": (self.pattern, None),
                "quantization_platform": (self.platform, None),
            }
            changed = [
                f"{name}={value!r}" for name, (value, usual) in without.items() if value != usual
            ]
            if changed:
                raise ArgumentError(
                    path=changed[0].partition("=")[0],
                    expected="quantization_method with it",
                    found=f"{', '.join(changed)} and quantization_method=None",
                )
            return
        settings = self.settings
        if not self.tensors:
            raise ArgumentError(
                path="quantize_tensors",
                expected="True, with a quantization_method",
                found=f"quantize_tensors=False and quantization_method={str(settings.method)!r}",
                next_step="leave quantization_method out to load floating weights",
            )
        if self.platform is not None:
            _check_platform(EasyDeLPlatforms(self.platform))

    @property
    def settings(self) -> QuantizationSettings:
        """Quantization settings of the loaded model; fails if the method is None."""
        method = EasyDeLQuantizationMethods(str(self.method))
        pattern = ".*" if self.pattern is None else self.pattern
        return QuantizationSettings(method, self.block_size, pattern)

    def check_stored(self, stored: Mapping[str, Any] | None, *, path: object) -> bool:
        """Return whether the load must quantize the checkpoint's weights.

        It must not if no method is requested, or if the checkpoint is already quantized as
        requested. A block size or pattern that the caller left out matches any stored one.

        Args:
            stored: the checkpoint's quantization settings; None if it is floating.
            path: the checkpoint, for the error.

        Raises:
            ArgumentError: if the checkpoint is quantized with other settings.
        """
        if self.method is None:
            return False
        if not stored:
            return True
        requested, own = self.settings, QuantizationSettings.from_dict(stored)
        same = (
            requested.method == own.method
            and self.block_size in (DEFAULT_BLOCK_SIZE, own.group_size)
            and self.pattern in (None, own.pattern)
        )
        if not same:
            raise ArgumentError(
                path="quantization_method",
                expected=f"{path} as it is quantized: {own.to_dict()}",
                found=str(requested.to_dict()),
                next_step="leave the quantization arguments out, or load a floating checkpoint",
            )
        return False


def quantize_layer(layer: Any, kernel: jax.Array, settings: QuantizationSettings) -> None:
    """Set a layer's kernel and quantize it on its devices, as `model.quantize` does."""
    layer.kernel.set_value(kernel)
    pack_kernel(layer, settings)


def filled(model: Any, placed: Mapping[str, Any], settings: QuantizationSettings) -> Any:
    """Return a model with quantized layers as a complete one, with its remaining leaves set.

    Args:
        model: a model whose layers `quantize_layer` has quantized.
        placed: values of other leaves, by path; leaves without a value stay as they are.
        settings: the quantization settings, stored as `model.quantization`.
    """
    model.quantization = settings
    graphdef, state = nnx.split(model)
    leaves = [placed.get(named.path, named.leaf) for named in named_leaves(state)]
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))


def _check_platform(platform: EasyDeLPlatforms) -> None:
    backend = jax.default_backend()
    if platform not in (EasyDeLPlatforms.JAX, backend):
        raise ArgumentError(
            path="quantization_platform",
            expected=f"'jax' or {backend!r}: weights are quantized by JAX, on the devices they go "
            "to",
            found=repr(str(platform)),
        )
