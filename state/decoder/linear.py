"""Linear layers that name their axes."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from cairn.state.config import DecoderConfig


def linear(
    config: DecoderConfig,
    features_in: int,
    features_out: int,
    *,
    axes: tuple[str, ...],
    use_bias: bool,
    dtype: Any,
    param_dtype: Any,
    precision: Any,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A kernel [in, out], with a bias [out] if asked for; `axes` go along as metadata."""
    return nnx.Linear(
        features_in,
        features_out,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        kernel_init=jax.nn.initializers.normal(config.initializer_range),
        kernel_metadata={"axes": axes},
        bias_metadata={"axes": axes[1:]},
        rngs=rngs,
    )
