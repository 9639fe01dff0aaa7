"""Parts of a decoder: every layer with weights by its path, for its modules and its rules.

This is the one list. `cairn.state.models.decoder` builds its modules from it, and readers without
JAX learn from it which leaves a config describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.config.latent_attention import LatentAttentionConfig
from cairn.interop.placement.decoder_axes import DECODER_AXES

__all__ = ["Part", "PartKind", "decoder_parts", "layer_parts", "leaf_shapes", "parts_below"]

_LATENT_EPS = 1e-6
"""Epsilon of the short vectors' norms, whatever `rms_norm_eps` is: DeepSeek's code fixes it."""

Shape = tuple[int, ...]
Axes = tuple[str | None, ...]


class PartKind(StrEnum):
    """Kind of operation of a layer with weights."""

    LINEAR = "linear"
    EXPERTS = "experts"
    NORM = "norm"
    EMBEDDING = "embedding"
    VECTOR = "vector"
    UNTRAINED = "untrained"


_MAIN_LEAF = {
    PartKind.LINEAR: "kernel",
    PartKind.EXPERTS: "kernel",
    PartKind.NORM: "scale",
    PartKind.EMBEDDING: "embedding",
}


@dataclass(frozen=True)
class Part:
    """Layer with weights.

    Attributes:
        kind: what it does.
        shape: of its main leaf: a kernel [in, out] ([experts, in, out]), a scale, an embedding
            [rows, width], or a vector, which is a leaf itself.
        axes: logical axis of each dimension.
        bias: whether it has a bias besides.
        eps: of a norm: its epsilon, if it is another than the config's.
    """

    kind: PartKind
    shape: Shape
    axes: Axes
    bias: bool = False
    eps: float | None = None

    @property
    def leaves(self) -> dict[str, tuple[Shape, Axes]]:
        """Its leaves by their name below its path ("" for the path itself): shapes and axes."""
        found = {_MAIN_LEAF.get(self.kind, ""): (self.shape, self.axes)}
        if self.bias:
            inputs = self.kind in (PartKind.LINEAR, PartKind.EXPERTS)
            keep = [n for n in range(len(self.shape)) if not inputs or n != len(self.shape) - 2]
            found["bias"] = tuple(self.shape[n] for n in keep), tuple(self.axes[n] for n in keep)
        return found


def decoder_parts(config: DecoderConfig) -> dict[str, Part]:
    """Return every layer with weights by its path, in the order in which a token passes them."""
    width = config.hidden_size
    found = {"model/embed_tokens": _part("embed_tokens", config.vocab_size, width)}
    if config.learned_positions:
        rows = config.max_position_embeddings
        found["model/embed_positions"] = _part("embed_positions", rows, width)
    for number in range(config.num_hidden_layers):
        inner = layer_parts(config, number)
        found |= {f"model/layers/{number}/{name}": part for name, part in inner.items()}
    found["model/norm"] = _norm(config)
    if not config.tie_word_embeddings:
        found["lm_head"] = _part("lm_head", width, config.vocab_size)
    return found


def layer_parts(config: DecoderConfig, layer: int) -> dict[str, Part]:
    """Return the layers with weights of one block, by their paths in it."""
    before, after = config.block != "post", config.block in ("post", "sandwich")
    found: dict[str, Part] = {}
    if before:
        found["input_layernorm"] = _norm(config)
    attention = _attention(config) if config.latent is None else _latent(config, config.latent)
    found |= {f"self_attn/{name}": part for name, part in attention.items()}
    if after:
        found["attention_output_norm"] = _norm(config)
    if before and not config.shared_norm:
        found["post_attention_layernorm"] = _norm(config)
    experts = config.experts if config.has_experts(layer) else None
    mlp = _mlp(config, config.intermediate_size) if experts is None else _experts(config, experts)
    found |= {f"mlp/{name}": part for name, part in mlp.items()}
    if after:
        found["mlp_output_norm"] = _norm(config)
    return found


def leaf_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Return the shape of every leaf that `DecoderForCausalLM` has with this config."""
    return {
        f"{path}/{name}" if name else path: shape
        for path, part in decoder_parts(config).items()
        for name, (shape, _) in part.leaves.items()
    }


def parts_below(parts: Mapping[str, Part], prefix: str) -> dict[str, Part]:
    """Return the parts whose paths begin with `prefix/`, by the rest of their paths."""
    start = f"{prefix}/"
    return {
        path.removeprefix(start): part for path, part in parts.items() if path.startswith(start)
    }


def _part(name: str, *shape: int, bias: bool = False) -> Part:
    kind = PartKind.EMBEDDING if name.startswith("embed_") else PartKind.LINEAR
    return Part(kind, shape, DECODER_AXES[name], bias)


def _norm(config: DecoderConfig) -> Part:
    axes = DECODER_AXES["norm"]
    return Part(PartKind.NORM, (config.hidden_size,), axes, config.norm_bias)


def _attention(config: DecoderConfig) -> dict[str, Part]:
    width, heads, size = config.hidden_size, config.num_attention_heads, config.head_size
    bias, out_bias = config.attention_bias, config.attention_out_bias
    found = {
        "q_proj": _part("q_proj", width, heads * size, bias=bias),
        "k_proj": _part("k_proj", width, config.kv_heads * size, bias=bias),
        "v_proj": _part("v_proj", width, config.kv_heads * size, bias=bias),
    }
    for name, count in (("q_norm", heads), ("k_norm", config.kv_heads)):
        if config.qk_norm is not None:
            shape = {"head": (size,), "each_head": (count, size), "whole": (count * size,)}
            own = shape[config.qk_norm]
            axes = (DECODER_AXES[name][0], "norm") if len(own) == 2 else ("norm",)
            found[name] = Part(PartKind.NORM, own, axes)
    if config.attention_sinks:
        found["sinks"] = Part(PartKind.VECTOR, (heads,), DECODER_AXES["sinks"])
    return found | {"o_proj": _part("o_proj", heads * size, width, bias=out_bias)}


def _latent(config: DecoderConfig, latent: LatentAttentionConfig) -> dict[str, Part]:
    width, heads, rank = config.hidden_size, config.num_attention_heads, latent.query_rank
    bias = config.attention_bias
    found: dict[str, Part] = {}
    if rank is None:
        found["q_proj"] = _part("q_proj", width, heads * latent.key_dim)
    else:
        found["q_a_proj"] = _part("q_a_proj", width, rank, bias=bias)
        found["q_a_norm"] = Part(PartKind.NORM, (rank,), ("norm",), eps=_LATENT_EPS)
        found["q_b_proj"] = _part("q_b_proj", rank, heads * latent.key_dim)
    short = latent.key_value_rank
    found["kv_a_proj"] = _part("kv_a_proj", width, short + latent.rotary_dim, bias=bias)
    found["kv_a_norm"] = Part(PartKind.NORM, (short,), ("norm",), eps=_LATENT_EPS)
    found["kv_b_proj"] = _part("kv_b_proj", short, heads * (latent.content_dim + latent.value_dim))
    found["o_proj"] = _part(
        "o_proj", heads * latent.value_dim, width, bias=config.attention_out_bias
    )
    return found


def _mlp(config: DecoderConfig, inner: int) -> dict[str, Part]:
    width, bias = config.hidden_size, config.mlp_bias
    found = {"gate_proj": _part("gate_proj", width, inner, bias=bias)} if config.gated_mlp else {}
    found["up_proj"] = _part("up_proj", width, inner, bias=bias)
    found["down_proj"] = _part("down_proj", inner, width, bias=bias)
    return found


def _experts(config: DecoderConfig, experts: ExpertsConfig) -> dict[str, Part]:
    width, count = config.hidden_size, experts.count
    found = {"router": _part("router", width, count, bias=experts.router_bias)}
    if experts.correction:
        found["correction"] = Part(PartKind.UNTRAINED, (count,), DECODER_AXES["correction"])
    for name, part in _mlp(config, experts.intermediate_size).items():
        axes = ("experts", *part.axes)
        shape = (count, *part.shape)
        found[f"experts/{name}"] = Part(PartKind.EXPERTS, shape, axes, experts.bias)
    if experts.shared_size is not None:
        shared = _mlp(config, experts.shared_size)
        found |= {f"shared/{name}": part for name, part in shared.items()}
        if experts.shared_gate:
            found["shared_gate"] = _part("shared_gate", width, 1)
    return found
