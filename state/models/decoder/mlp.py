"""Feed-forward layers: a single one, or a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import Layer, layers_below
from cairn.interop.config.experts import ExpertsConfig
from cairn.state.models.decoder.layers import make_layer

_CLAMPED_SHARPNESS = 1.702

ACTIVATION_FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class Feeding(nnx.Module):
    """Base of feed-forward layers: the projections, and the activation between them.

    The activation is `act(gate) * up`, or `act(up)` without a gate (arXiv 2002.05202). With an
    `activation_limit` it is `(up + 1) gate sigmoid(1.702 gate)`, with gate and up clamped to the
    limit (gpt-oss, arXiv 2508.10925).
    """

    def __init__(self, config: DecoderConfig, layers: Mapping[str, Layer], **options: Any) -> None:
        self.activation = config.hidden_act
        self.limit = config.activation_limit
        for name in ("gate_proj", "up_proj", "down_proj"):
            if name in layers:
                setattr(self, name, make_layer(layers[name], config, **options))

    def inner(self, up: jax.Array, gate: jax.Array | None) -> jax.Array:
        """Return the input of the down projection; `gate` is None in layers without a gate."""
        if self.limit is not None and gate is not None:
            gate = jnp.minimum(gate, self.limit)
            up = jnp.clip(up, -self.limit, self.limit)
            return (up + 1) * gate * jax.nn.sigmoid(gate * _CLAMPED_SHARPNESS)
        activate = ACTIVATION_FUNCTIONS[self.activation]
        return activate(up) if gate is None else activate(gate) * up


class MLP(Feeding):
    """Feed-forward layer `down(act(gate(x)) * up(x))`; without a gate, `down(act(up(x)))`."""

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Return the layer's contribution to the residual stream."""
        gate = self.gate_proj(x) if hasattr(self, "gate_proj") else None
        out: jax.Array = self.down_proj(self.inner(self.up_proj(x), gate))
        return out


class Experts(Feeding):
    """The experts of a layer, each a feed-forward layer of its own."""

    def __call__(
        self, rows: Float[Array, "R D"], counts: Int[Array, " E"], expert: Int[Array, " R"]
    ) -> Float[Array, "R D"]:
        """Apply each row's expert to it; the arguments are those of `ExpertsLinear`."""
        gate = self.gate_proj(rows, counts, expert) if hasattr(self, "gate_proj") else None
        inner = self.inner(self.up_proj(rows, counts, expert), gate)
        out: jax.Array = self.down_proj(inner, counts, expert)
        return out


class MixtureOfExperts(nnx.Module):
    """Feed-forward layer of several experts; a router chooses a few of them for each token.

    Experts have no capacity limit, so no token is dropped: rows are sorted by expert and multiplied
    in groups. `ExpertsConfig` has the options.
    """

    def __init__(
        self,
        config: DecoderConfig,
        experts: ExpertsConfig,
        layers: Mapping[str, Layer],
        **options: Any,
    ) -> None:
        self.settings = experts
        # In float32, as in the router's training: rounding would change the choice at near ties.
        precise = options | {"dtype": jnp.float32}
        self.router = make_layer(layers["router"], config, **precise)
        if "correction" in layers:
            self.correction = make_layer(layers["correction"], config, **options)
        self.experts = Experts(config, layers_below(layers, "experts"), **options)
        if experts.shared_size is not None:
            self.shared = MLP(config, layers_below(layers, "shared"), **options)
        if "shared_gate" in layers:
            self.shared_gate = make_layer(layers["shared_gate"], config, **options)

    def __call__(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T E"]]:
        """Return the layer's contribution to the residual stream, and the router's logits."""
        settings, width = self.settings, x.shape[-1]
        logits = self.router(x.astype(jnp.float32))
        chosen, weights = self._route(logits.reshape(-1, settings.count))
        tokens = x.reshape(-1, width)
        expert = chosen.reshape(-1)
        order = jnp.argsort(expert, stable=True)
        token = order // settings.per_token
        counts = jnp.bincount(expert, length=settings.count).astype(jnp.int32)
        outputs = self.experts(tokens[token], counts, expert[order])
        outputs = outputs * weights.reshape(-1)[order].astype(outputs.dtype)[:, None]
        out = jnp.zeros_like(tokens).at[token].add(outputs).reshape(x.shape)
        if hasattr(self, "shared"):
            shared = self.shared(x)
            if hasattr(self, "shared_gate"):
                shared = jax.nn.sigmoid(self.shared_gate(x)) * shared
            out = out + shared
        return out, logits

    def _route(self, logits: Float[Array, "R E"]) -> tuple[Int[Array, "R K"], Float[Array, "R K"]]:
        """Return the indices of each token's experts, and the weights of the experts' outputs."""
        settings = self.settings
        softmax = settings.score == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if softmax else jax.nn.sigmoid(logits)
        ranking = scores
        if hasattr(self, "correction"):
            ranking = scores + self.correction[...].astype(jnp.float32)[None, :]
        if settings.groups > 1:
            ranking = jnp.where(self._allowed(ranking), ranking, -jnp.inf)
        _, chosen = jax.lax.top_k(ranking, settings.per_token)
        weights = jnp.take_along_axis(scores, chosen, axis=-1)
        if settings.normalize:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return chosen, weights * settings.scale

    def _allowed(self, ranking: Float[Array, "R E"]) -> jax.Array:
        """Return a mask [rows, experts]: True for experts in one of the token's best groups."""
        settings = self.settings
        grouped = ranking.reshape(ranking.shape[0], settings.groups, -1)
        best, _ = jax.lax.top_k(grouped, 1 if settings.group_score == "max" else 2)
        _, groups = jax.lax.top_k(best.sum(axis=-1), settings.groups_per_token)
        inside = jax.nn.one_hot(groups, settings.groups, dtype=jnp.bool_).any(axis=1)
        return jnp.repeat(inside, settings.count // settings.groups, axis=-1)
