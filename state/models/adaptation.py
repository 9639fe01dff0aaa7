"""Quantization and low-rank adapters of a module, as a mixin of EasyDeLBaseModule."""

from __future__ import annotations

from typing import Any, Self

import jax.numpy as jnp
from flax import nnx

from cairn.interop.errors import ArgumentError
from cairn.interop.names import EasyDeLQuantizationMethods
from cairn.state.adapters.layers import (
    check_mergeable,
    dequantize_layers,
    give_adapters,
    merge_layers,
    quantize_layers,
    unwrap_layers,
)
from cairn.state.adapters.lora import LoraSettings
from cairn.state.adapters.quantization import QuantizationSettings
from cairn.state.adapters.quantized_weight import PackedParam
from cairn.state.paths import has_variables, own_variables, rebuild

__all__ = ["ModuleAdaptationMixin"]


class ModuleAdaptationMixin:
    """Quantization and adapters of a module; the methods change it in place and return it.

    Layers of the classes `nnx.Linear`, `nnx.LinearGeneral` and `nnx.Einsum` can be quantized or
    adapted, an untied output head among them. Embeddings, norms, biases, a head that is tied to the
    embedding, and layers that `nnx.vmap` stacked stay as they are.

    Attributes:
        quantization: settings of the module's quantization, None if it is not quantized.
        lora: settings of the module's adapters, None if it has none.
    """

    quantization: QuantizationSettings | None = None
    lora: LoraSettings | None = None

    @property
    def is_quantized(self) -> bool:
        """True if some weights are quantized."""
        return has_variables(self, PackedParam)

    @property
    def lora_is_enabled(self) -> bool:
        """True if the model has low-rank adapters."""
        return has_variables(self, nnx.LoRAParam)

    def quantize(
        self,
        method: EasyDeLQuantizationMethods | str = EasyDeLQuantizationMethods.NF4,
        group_size: int = 64,
        quantization_pattern: str = ".*",
    ) -> Self:
        """Quantize weights, each on its devices: a sharded model is never gathered.

        Adapters, embeddings and norms stay floating, and so do, with a warning, the weights of
        experts. Quantized weights can't be trained: add adapters for that.

        Args:
            method: "nf4", "8bit", "a8bit", "a8q", "a4q" or "aqt"; the docstring of the module
                `cairn.state.adapters.quantization` describes each.
            group_size: number of inputs that share a scale, -1 for all of them; a layer with fewer
                inputs is one group.
            quantization_pattern: regular expression, searched in the "/"-joined path of each layer.

        Raises:
            ArgumentError: if the model is quantized already, the method is unknown, the pattern
                matches no layer, or the group size does not divide a layer's number of inputs. The
                model is unchanged.
        """
        settings = QuantizationSettings(
            EasyDeLQuantizationMethods(method), group_size, quantization_pattern
        )
        if self.quantization is not None:
            raise ArgumentError(
                path=f"{type(self).__name__}.quantize",
                expected="a model that is not quantized",
                found=str(self.quantization),
                next_step="call dequantize() first",
            )
        quantize_layers(self, settings)
        self.quantization = settings
        return self

    def dequantize(self) -> Self:
        """Replace the quantized weights by floating ones, in the dtype from before `quantize`.

        The rounding errors of the quantization remain.

        Raises:
            ArgumentError: if the model is not quantized.
        """
        if self.quantization is None:
            raise ArgumentError(
                path=f"{type(self).__name__}.dequantize",
                expected="a quantized model",
                found="one that is not",
                next_step="call quantize() first",
            )
        dequantize_layers(self)
        del self.quantization
        return self

    def apply_lora_to_layers(
        self,
        lora_rank: int,
        lora_alpha: float | None = None,
        lora_pattern: str = ".*",
        *,
        rngs: nnx.Rngs | None = None,
        lora_dtype: Any = jnp.float32,
    ) -> Self:
        """Add low-rank adapters to layers; only the adapters are trained from then on.

        `(alpha / rank) (x A) B` is added to a layer's output, computed in the layer's dtype. A is
        random and B zero, so the model's outputs stay the same until the adapters are trained. On
        a quantized model this is QLoRA.

        Args:
            lora_rank: columns of A and rows of B, 1 or more.
            lora_alpha: numerator of the scale `alpha / rank`; None for a scale of 1.
            lora_pattern: regular expression, searched in the "/"-joined path of each layer.
            rngs: random stream for A (seed 0 by default).
            lora_dtype: dtype of A and B. float32 keeps small updates that bfloat16 would round
                away; None takes the dtype of each layer's weight.

        Raises:
            ArgumentError: if the model has adapters already, the rank is below 1, the dtype not
                floating, or the pattern matches no layer. The model is unchanged.
        """
        alpha: Any = lora_rank if lora_alpha is None else lora_alpha
        settings = LoraSettings(lora_rank, alpha, lora_pattern, lora_dtype)
        if self.lora_is_enabled:
            raise ArgumentError(
                path=f"{type(self).__name__}.apply_lora_to_layers",
                expected="a model without adapters",
                found=str(self.lora or "adapters of its own"),
                next_step="call unwrap_lora_to_layers() first",
            )
        give_adapters(self, settings, rngs)
        self.lora = settings
        return self

    def split_lora_params(self) -> tuple[nnx.State[Any, Any], nnx.State[Any, Any]]:
        """Return the parameters as (base, adapters).

        Later changes of the module do not change them.

        Raises:
            ArgumentError: if the model has no adapters.
        """
        self._require_lora("split_lora_params")
        adapters, base, _ = nnx.state(self, nnx.LoRAParam, nnx.Param, ...)
        return own_variables(base), own_variables(adapters)

    def merge_lora_params(self, lora: Any = None) -> Self:
        """Put the given adapters into the module, or merge the module's own into its weights.

        Args:
            lora: adapters as `split_lora_params` returned them, or a nested dict of the same
                paths and shapes, which replace the module's. None adds the effect of the module's
                adapters to its weights, and sets B to zero: the outputs stay the same, and the
                adapters can be trained further.

        Raises:
            ArgumentError: if the model has no adapters; or, without `lora`, if it is quantized, or
                a layer with adapters shares its kernel with another layer.
            TreeStructureError: if the given adapters' paths or shapes are not those of the
                module's; lists all differences.
        """
        self._require_lora("merge_lora_params")
        if lora is not None:
            own = nnx.state(self, nnx.LoRAParam)
            nnx.update(self, rebuild(own, lora, path=f"adapters of {type(self).__name__}"))
            return self
        if self.quantization is not None:
            raise ArgumentError(
                path=f"{type(self).__name__}.merge_lora_params",
                expected="floating weights",
                found=str(self.quantization),
                next_step="call dequantize() first, or unwrap_lora_to_layers(), which does",
            )
        check_mergeable(self)
        merge_layers(self)
        return self

    def unwrap_lora_to_layers(self) -> Self:
        """Merge the adapters into the weights and remove them.

        A quantized model becomes floating: merged weights do not fit the quantized format.

        Raises:
            ArgumentError: if the model has no adapters, or layers with adapters share their kernel
                with other layers; lists all of them. The model is unchanged.
        """
        self._require_lora("unwrap_lora_to_layers")
        check_mergeable(self)
        if self.quantization is not None:
            self.dequantize()
        merge_layers(self)
        unwrap_layers(self)
        del self.lora
        return self

    def _require_lora(self, method: str) -> None:
        if self.lora is None:
            raise ArgumentError(
                path=f"{type(self).__name__}.{method}",
                expected="a model with adapters",
                found="one that has none",
                next_step="call apply_lora_to_layers() first",
            )
