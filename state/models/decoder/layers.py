"""Creation of a decoder's layers that have weights."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import Layer, LayerKind
from cairn.state.models.decoder.norms import LayerNorm, RMSNorm

__all__ = ["ExpertsLinear", "Untrained", "make_layer"]


class Untrained(nnx.Variable[Any]):
    """Variable of a model that is saved with it, but not trained."""


class ExpertsLinear(nnx.Module):
    """Linear layers of all experts: one kernel [experts, in, out] and one bias [experts, out]."""

    def __init__(
        self, spec: Layer, initializer: Any, *, param_dtype: Any, precision: Any, key: jax.Array
    ) -> None:
        self.precision = precision
        self.kernel = nnx.Param(initializer(key, spec.shape, param_dtype), axes=spec.axes)
        if spec.bias:
            shape, axes = spec.leaves["bias"]
            self.bias = nnx.Param(jnp.zeros(shape, param_dtype), axes=axes)

    def __call__(
        self, rows: Float[Array, "R D"], counts: Int[Array, " E"], expert: Int[Array, " R"]
    ) -> Float[Array, "R F"]:
        """Apply each row's expert to it.

        Args:
            rows: rows, sorted by their experts.
            counts: number of rows of each expert.
            expert: number of each row's expert.
        """
        kernel = self.kernel[...].astype(rows.dtype)
        out: jax.Array = jax.lax.ragged_dot(rows, kernel, counts, precision=self.precision)
        return out + self.bias[...].astype(rows.dtype)[expert] if hasattr(self, "bias") else out


def make_layer(
    spec: Layer,
    config: DecoderConfig,
    *,
    dtype: Any,
    param_dtype: Any,
    precision: Any,
    rngs: nnx.Rngs,
) -> Any:
    """Return a new module or variable for a layer; its Variables have axis names as metadata.

    Args:
        spec: kind, shape and axis names of the layer.
        config: configuration of the decoder.
        dtype: dtype of the computation.
        param_dtype: dtype of the layer's weights.
        precision: precision of matrix multiplications; None for JAX's default.
        rngs: source of the initial weights.
    """
    initializer = jax.nn.initializers.normal(config.initializer_range)
    shape, axes = spec.shape, spec.axes
    if spec.kind is LayerKind.LINEAR:
        return nnx.Linear(
            *shape,
            use_bias=spec.bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=initializer,
            kernel_metadata={"axes": axes},
            bias_metadata={"axes": axes[1:]},
            rngs=rngs,
        )
    if spec.kind is LayerKind.EMBEDDING:
        return nnx.Embed(
            *shape,
            dtype=dtype,
            param_dtype=param_dtype,
            embedding_init=initializer,
            embedding_metadata={"axes": axes},
            rngs=rngs,
        )
    if spec.kind is LayerKind.EXPERTS:
        options = {"param_dtype": param_dtype, "precision": precision}
        return ExpertsLinear(spec, initializer, **options, key=rngs.params())
    if spec.kind is LayerKind.NORM:
        eps = config.rms_norm_eps if spec.eps is None else spec.eps
        norm_options = {"eps": eps, "param_dtype": param_dtype, "axes": axes}
        if config.norm == "layer":
            return LayerNorm(shape, **norm_options, use_bias=spec.bias)
        return RMSNorm(shape, **norm_options, offset=config.norm == "rms_offset")
    kind = Untrained if spec.kind is LayerKind.UNTRAINED else nnx.Param
    return kind(jnp.zeros(shape, param_dtype), axes=axes)
