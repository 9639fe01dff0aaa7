"""Table of a decoder's layers that have weights, by their paths.

`cairn.state.models.decoder` builds its modules from it, and exports learn from it which leaves a
config describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.config.latent_attention import LatentAttentionConfig
from cairn.interop.placement.decoder_axes import DECODER_AXES

__all__ = ["Layer", "LayerKind", "block_layers", "decoder_layers", "layers_below", "leaf_shapes"]

_LATENT_EPS = 1e-6
"""Epsilon of the norms in latent attention; DeepSeek's code ignores `rms_norm_eps` there."""

Shape = tuple[int, ...]
Axes = tuple[str | None, ...]


class LayerKind(StrEnum):
    """Kinds of layers with weights."""

    LINEAR = "linear"
    EXPERTS = "experts"
    NORM = "norm"
    EMBEDDING = "embedding"
    VECTOR = "vector"
    UNTRAINED = "untrained"


_MAIN_LEAF = {
    LayerKind.LINEAR: "kernel",
    LayerKind.EXPERTS: "kernel",
    LayerKind.NORM: "scale",
    LayerKind.EMBEDDING: "embedding",
}


@dataclass(frozen=True)
class Layer:
    """Layer with weights.

    Attributes:
        kind: the layer's kind.
        shape: shape of its main leaf: a kernel [in, out] or [experts, in, out], a scale [width], an
            embedding [rows, width], or a vector.
        axes: logical axis of each dimension of the main leaf.
        bias: whether it also has a bias.
        eps: epsilon of a norm; None: the config's.
    """

    kind: LayerKind
    shape: Shape
    axes: Axes
    bias: bool = False
    eps: float | None = None

    @property
    def leaves(self) -> dict[str, tuple[Shape, Axes]]:
        """Shape and axes of each leaf, by its name below the layer's path ("": the path itself)."""
        leaves = {_MAIN_LEAF.get(self.kind, ""): (self.shape, self.axes)}
        if self.bias:
            inputs = self.kind in (LayerKind.LINEAR, LayerKind.EXPERTS)
            keep = [n for n in range(len(self.shape)) if not inputs or n != len(self.shape) - 2]
            leaves["bias"] = tuple(self.shape[n] for n in keep), tuple(self.axes[n] for n in keep)
        return leaves


def decoder_layers(config: DecoderConfig) -> dict[str, Layer]:
    """Return every layer with weights by its path, in the order of the forward pass."""
    width = config.hidden_size
    layers = {"model/embed_tokens": _layer("embed_tokens", config.vocab_size, width)}
    if config.learned_positions:
        rows = config.max_position_embeddings
        layers["model/embed_positions"] = _layer("embed_positions", rows, width)
    for number in range(config.num_hidden_layers):
        inner = block_layers(config, number)
        layers |= {f"model/layers/{number}/{name}": layer for name, layer in inner.items()}
    layers["model/norm"] = _norm(config)
    if not config.tie_word_embeddings:
        layers["lm_head"] = _layer("lm_head", width, config.vocab_size)
    return layers


def block_layers(config: DecoderConfig, number: int) -> dict[str, Layer]:
    """Return the layers with weights of block `number`, by their paths inside the block."""
    before, after = config.block != "post", config.block in ("post", "sandwich")
    layers: dict[str, Layer] = {}
    if before:
        layers["input_layernorm"] = _norm(config)
    attention = _attention(config) if config.latent is None else _latent(config, config.latent)
    layers |= {f"self_attn/{name}": layer for name, layer in attention.items()}
    if after:
        layers["attention_output_norm"] = _norm(config)
    if before and not config.shared_norm:
        layers["post_attention_layernorm"] = _norm(config)
    experts = config.experts if config.has_experts(number) else None
    mlp = _mlp(config, config.intermediate_size) if experts is None else _experts(config, experts)
    layers |= {f"mlp/{name}": layer for name, layer in mlp.items()}
    if after:
        layers["mlp_output_norm"] = _norm(config)
    return layers


def leaf_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shape of every leaf that `DecoderForCausalLM` has with this config."""
    return {
        f"{path}/{name}" if name else path: shape
        for path, layer in decoder_layers(config).items()
        for name, (shape, _) in layer.leaves.items()
    }


def layers_below(layers: Mapping[str, Layer], prefix: str) -> dict[str, Layer]:
    """Return the layers whose paths begin with `prefix/`, by their paths without it."""
    start = f"{prefix}/"
    return {
        path.removeprefix(start): layer for path, layer in layers.items() if path.startswith(start)
    }


def _layer(name: str, *shape: int, bias: bool = False) -> Layer:
    kind = LayerKind.EMBEDDING if name.startswith("embed_") else LayerKind.LINEAR
    return Layer(kind, shape, DECODER_AXES[name], bias)


def _norm(config: DecoderConfig) -> Layer:
    axes = DECODER_AXES["norm"]
    return Layer(LayerKind.NORM, (config.hidden_size,), axes, config.norm_bias)


def _attention(config: DecoderConfig) -> dict[str, Layer]:
    width, heads, size = config.hidden_size, config.num_attention_heads, config.head_size
    bias, out_bias = config.attention_bias, config.attention_out_bias
    layers = {
        "q_proj": _layer("q_proj", width, heads * size, bias=bias),
        "k_proj": _layer("k_proj", width, config.kv_heads * size, bias=bias),
        "v_proj": _layer("v_proj", width, config.kv_heads * size, bias=bias),
    }
    for name, count in (("q_norm", heads), ("k_norm", config.kv_heads)):
        if config.qk_norm is not None:
            shape = {"head": (size,), "each_head": (count, size), "whole": (count * size,)}
            own = shape[config.qk_norm]
            axes = (DECODER_AXES[name][0], "norm") if len(own) == 2 else ("norm",)
            layers[name] = Layer(LayerKind.NORM, own, axes)
    if config.attention_sinks:
        layers["sinks"] = Layer(LayerKind.VECTOR, (heads,), DECODER_AXES["sinks"])
    return layers | {"o_proj": _layer("o_proj", heads * size, width, bias=out_bias)}


def _latent(config: DecoderConfig, latent: LatentAttentionConfig) -> dict[str, Layer]:
    width, heads, rank = config.hidden_size, config.num_attention_heads, latent.query_rank
    bias = config.attention_bias
    layers: dict[str, Layer] = {}
    if rank is None:
        layers["q_proj"] = _layer("q_proj", width, heads * latent.key_dim)
    else:
        layers["q_a_proj"] = _layer("q_a_proj", width, rank, bias=bias)
        layers["q_a_norm"] = Layer(LayerKind.NORM, (rank,), ("norm",), eps=_LATENT_EPS)
        layers["q_b_proj"] = _layer("q_b_proj", rank, heads * latent.key_dim)
    short = latent.key_value_rank
    layers["kv_a_proj"] = _layer("kv_a_proj", width, short + latent.rotary_dim, bias=bias)
    layers["kv_a_norm"] = Layer(LayerKind.NORM, (short,), ("norm",), eps=_LATENT_EPS)
    layers["kv_b_proj"] = _layer(
        "kv_b_proj", short, heads * (latent.content_dim + latent.value_dim)
    )
    layers["o_proj"] = _layer(
        "o_proj", heads * latent.value_dim, width, bias=config.attention_out_bias
    )
    return layers


def _mlp(config: DecoderConfig, inner: int) -> dict[str, Layer]:
    width, bias = config.hidden_size, config.mlp_bias
    layers = {"gate_proj": _layer("gate_proj", width, inner, bias=bias)} if config.gated_mlp else {}
    layers["up_proj"] = _layer("up_proj", width, inner, bias=bias)
    layers["down_proj"] = _layer("down_proj", inner, width, bias=bias)
    return layers


def _experts(config: DecoderConfig, experts: ExpertsConfig) -> dict[str, Layer]:
    width, count = config.hidden_size, experts.count
    layers = {"router": _layer("router", width, count, bias=experts.router_bias)}
    if experts.correction:
        layers["correction"] = Layer(LayerKind.UNTRAINED, (count,), DECODER_AXES["correction"])
    for name, layer in _mlp(config, experts.intermediate_size).items():
        axes = ("experts", *layer.axes)
        shape = (count, *layer.shape)
        layers[f"experts/{name}"] = Layer(LayerKind.EXPERTS, shape, axes, experts.bias)
    if experts.shared_size is not None:
        shared = _mlp(config, experts.shared_size)
        layers |= {f"shared/{name}": layer for name, layer in shared.items()}
        if experts.shared_gate:
            layers["shared_gate"] = _layer("shared_gate", width, 1)
    return layers
