"""The gated feed-forward layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from cairn.state.config import DecoderConfig
from cairn.state.decoder.linear import linear
from cairn.state.placement import DECODER_AXES

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`.

    Source: arXiv 2002.05202 (GLU variants).
    """

    def __init__(self, config: DecoderConfig, **options: Any) -> None:
        self.activation = config.hidden_act
        inner, outer = config.intermediate_size, config.hidden_size
        options["use_bias"] = config.mlp_bias
        self.gate_proj = linear(config, outer, inner, axes=DECODER_AXES["gate_proj"], **options)
        self.up_proj = linear(config, outer, inner, axes=DECODER_AXES["up_proj"], **options)
        self.down_proj = linear(config, inner, outer, axes=DECODER_AXES["down_proj"], **options)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The layer's contribution to the residual stream."""
        activate = ACTIVATION_FUNCTIONS[self.activation]
        out: jax.Array = self.down_proj(activate(self.gate_proj(x)) * self.up_proj(x))
        return out
