"""Options of the decoder: each family of models uses some values of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from cairn.interop import registry
from cairn.interop.config.base import EDPretrainedConfig, is_integer, jsonable, tuples
from cairn.interop.config.experts import ExpertsConfig
from cairn.interop.config.latent_attention import LatentAttentionConfig
from cairn.interop.config.rope import RopeConfig
from cairn.interop.errors import ConfigError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "clamped_silu")
NORMS = ("rms", "rms_offset", "layer")
BLOCKS = ("pre", "post", "sandwich", "parallel")
QK_NORMS = ("head", "each_head", "whole")
FULL, WINDOW = "full_attention", "sliding_attention"

OURS_ALONE = frozenset(
    {
        "partition_axis",
        "remat",
        "scan_layers",
        "shard_attention_computation",
        "sharding_axis_dims",
        "sharding_axis_names",
        "sharding_dcn_axis_dims",
        "tokenizer_files",
    }
)
"""Fields that say how a model runs, not what it computes; no config.json has them."""


_FLAGS = (
    *("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings", "norm_bias"),
    *("shared_norm", "gated_mlp", "attention_sinks", "learned_positions"),
    *("scan_layers", "remat", "shard_attention_computation"),
)
_CHOICES = {"hidden_act": ACTIVATIONS, "norm": NORMS, "block": BLOCKS}
_SCALES = ("embedding_scale", "residual_scale", "logit_scale")
_POSITIVE_OR_NONE = ("attention_scale", "attention_soft_cap", "logit_soft_cap", "activation_limit")
_NESTED = {
    "rope": RopeConfig,
    "window_rope": RopeConfig,
    "experts": ExpertsConfig,
    "latent": LatentAttentionConfig,
}


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(EDPretrainedConfig):
    """Shape and options of `DecoderForCausalLM`; names follow Hugging Face's where they exist.

    Attributes:
        model_type: the family of models, which defines the keys of config.json.
        num_key_value_heads: heads of keys and values; None means as many as query heads.
        head_dim: size of one head; None means `hidden_size // num_attention_heads`.
        hidden_act: one of `ACTIVATIONS`.
        rms_norm_eps: epsilon of every norm, except those in latent attention, which use 1e-6.
        rope: rotary positions; None: the model has no rotary positions.
        attention_bias: biases on the query, key and value projections.
        attention_out_bias: a bias on the attention's output projection.
        mlp_bias: biases on the MLP's projections.
        tie_word_embeddings: the output head is the transposed embedding.
        norm: one of `NORMS`: RMS times a scale, RMS times 1 + scale, or LayerNorm.
        norm_bias: LayerNorm has a bias.
        block: one of `BLOCKS`: where the norms of attention and MLP stand. "pre": on the input of
            each; "post": on the output of each; "sandwich": on both; "parallel": on the input, and
            the MLP has the same input as attention, the block's.
        shared_norm: for block "parallel": attention and MLP share one norm.
        qk_norm: one of `QK_NORMS`: norm of queries and keys; with one scale for all heads, with a
            scale for each head, or over all heads of a token together. None: there is no such norm.
        sliding_window: number of tokens that a token of a `WINDOW` layer attends to, itself
            included.
        layer_types: `FULL` or `WINDOW` for each layer; None: all are `WINDOW` with a
            `sliding_window`, else `FULL`.
        window_rope: rotary positions of `WINDOW` layers; None: `rope`.
        layers_without_rope: numbers of the layers without rotary positions.
        attention_scale: factor on the products of queries and keys; None: 1 / sqrt(head_dim).
        attention_soft_cap: the scaled products x become `cap tanh(x / cap)`; None: no cap.
        attention_sinks: each head has a learned logit that takes part in the softmax beside the
            tokens.
        latent: multi-head latent attention in place of the usual one; `head_dim` is then ignored.
        learned_positions: a table of `max_position_embeddings` vectors is added to the embedding.
        gated_mlp: `down(act(gate(x)) up(x))`; else `down(act(up(x)))`.
        activation_limit: for the activation "clamped_silu": largest gate, and largest |up|.
        experts: mixture of experts; None: one MLP per layer.
        embedding_scale: factor on the embeddings.
        residual_scale: factor on the outputs of attention and MLP before they are added to the
            residual stream.
        logit_scale: factor on the logits.
        logit_soft_cap: logits x become `cap tanh(x / cap)`; None: no cap.
        initializer_range: standard deviation of new weights.
        scan_layers: trace one block and scan it over the layers, so that it compiles once; outside
            the traced function each layer keeps its own leaves.
        remat: recompute each block in the backward pass instead of keeping its activations.
        shard_attention_computation: False: while attention is computed, every device has all heads
            and tokens, wherever the parameters are; only the batch is split.
        hf_extra: keys of config.json that are no option (token ids, ...); `to_hf` writes them
            unchanged. They change no computation and take no part in equality.
    """

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    norm: str = "rms"
    norm_bias: bool = False
    block: str = "pre"
    shared_norm: bool = False
    qk_norm: str | None = None
    sliding_window: int | None = None
    layer_types: tuple[str, ...] | None = None
    window_rope: RopeConfig | None = None
    layers_without_rope: tuple[int, ...] = ()
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    latent: LatentAttentionConfig | None = None
    learned_positions: bool = False
    gated_mlp: bool = True
    activation_limit: float | None = None
    experts: ExpertsConfig | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    initializer_range: float = 0.02
    scan_layers: bool = False
    remat: bool = False
    shard_attention_computation: bool = True
    hf_extra: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim is None and self.num_attention_heads > 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        for name in ("layer_types", "layers_without_rope"):
            object.__setattr__(self, name, tuples(getattr(self, name)))
        object.__setattr__(self, "hf_extra", jsonable(self.hf_extra))
        super().__post_init__()

    @property
    def kv_heads(self) -> int:
        """Number of key and value heads: `num_key_value_heads`, or as many as query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Size of one head's query and key."""
        if self.latent is not None:
            return self.latent.key_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Size of one head's value."""
        return self.head_size if self.latent is None else self.latent.value_dim

    @property
    def rotary_size(self) -> int:
        """Number of a head's dimensions to which `RopeConfig.rotary_fraction` refers."""
        return self.head_size if self.latent is None else self.latent.rotary_dim

    def has_window(self, layer: int) -> bool:
        """Return whether a token of this layer sees no more than `sliding_window` tokens."""
        if self.layer_types is None:
            return self.sliding_window is not None
        return self.layer_types[layer] == WINDOW

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Return the rotary positions of a layer; None if it has none."""
        if layer in self.layers_without_rope:
            return None
        own = self.window_rope if self.has_window(layer) else None
        return self.rope if own is None else own

    @property
    def longest_sequence(self) -> int | None:
        """Most tokens of a sequence; None: any number.

        It is None with the rotary scaling "dynamic", which adapts to longer sequences. Other models
        were trained on at most `max_position_embeddings` tokens.
        """
        ropes = [self.rope_of(layer) for layer in range(self.num_hidden_layers)]
        scalings = {rope.scaling for rope in ropes if rope is not None}
        return None if scalings == {"dynamic"} else self.max_position_embeddings

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer's feed-forward is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def problems(self) -> list[str]:
        """Return everything wrong with the fields' values."""
        problems = super().problems()
        sizes = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        )
        bad = {n: getattr(self, n) for n in sizes if not _is_positive_int(getattr(self, n))}
        if bad:
            return [*problems, f"these must be positive integers: {bad}"]
        for names, is_fitting, expected in _CHECKS:
            values = {name: getattr(self, name) for name in names}
            other = {name: value for name, value in values.items() if not is_fitting(value)}
            if other:
                problems.append(f"these must be {expected}: {other}")
        if self.num_attention_heads % self.kv_heads:
            problems.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.kv_heads}"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                problems.append(f"{name} {getattr(self, name)!r} is none of {', '.join(choices)}")
        if self.qk_norm is not None and self.qk_norm not in QK_NORMS:
            problems.append(f"qk_norm {self.qk_norm!r} is none of {', '.join(QK_NORMS)}, nor None")
        nested: dict[str, Any] = {name: getattr(self, name) for name in _NESTED}
        unlike = [
            f"{name} {value!r} is no {_NESTED[name].__name__}"
            for name, value in nested.items()
            if value is not None and not isinstance(value, _NESTED[name])
        ]
        return problems + unlike if unlike else problems + self._nested_problems()

    def _nested_problems(self) -> list[str]:
        problems = [] if self.latent is None else self.latent.problems()
        if self.experts is not None:
            problems += self.experts.problems()
        for rope in (self.rope, self.window_rope):
            if rope is not None and not problems:
                problems += rope.problems(self.rotary_size)
        window: Any = self.sliding_window
        if window is not None and not _is_positive_int(window):
            problems.append(f"sliding_window {window!r} must be a positive integer, or None")
        types = self.layer_types
        if types is not None and (
            len(types) != self.num_hidden_layers or not {*types} <= {FULL, WINDOW}
        ):
            problems.append(
                f"layer_types {types} must be {self.num_hidden_layers} of {FULL} and {WINDOW}"
            )
        elif types is not None and WINDOW in types and window is None:
            problems.append(f"layers of {WINDOW} need a sliding_window")
        if self.rope is None and self.window_rope is not None:
            problems.append("window_rope is for models with a rope")
        if self.latent is not None and (self.qk_norm or self.kv_heads != self.num_attention_heads):
            problems.append("latent attention has as many key/value heads as heads, and no qk_norm")
        if self.norm_bias and self.norm != "layer":
            problems.append("norm_bias is for norm 'layer'")
        if self.shared_norm and self.block != "parallel":
            problems.append("shared_norm is for block 'parallel'")
        if (self.activation_limit is None) == (self.hidden_act == "clamped_silu"):
            problems.append("hidden_act 'clamped_silu' and activation_limit go together")
        return problems

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON, without newer options that have their default value.

        Earlier versions can then read a config that does not use the newer options.

        Raises:
            ConfigError: as in `EDPretrainedConfig.to_dict`.
        """
        data = super().to_dict()
        for name in _LATER:
            if data[name] == _DEFAULTS[name]:
                del data[name]
        for name in ("rope", "window_rope"):
            if data.get(name) is not None:
                usual = jsonable(RopeConfig())
                later = {key for key in _LATER_ROPE if data[name][key] == usual[key]}
                data[name] = {key: option for key, option in data[name].items() if key not in later}
        return data

    def to_hf(self) -> dict[str, Any]:
        """Return the content of config.json for this family.

        A null that means the same as an absent key is left out.

        Raises:
            ConfigError: config.json of the family has no key for some options; all are named.
        """
        family = registry.family(self.model_type)
        data = {
            name: entry
            for name, entry in family.write_config(self).items()
            if entry is not None or name in family.nulls
        }
        # What is written is read again: an option that the family has no key for would come back
        # changed, and is refused instead of being dropped.
        carried = self.hf_extra.keys() - family.known_keys
        read = {name: entry for name, entry in data.items() if name not in carried}
        again = type(self)(**family.read_options(read))
        lost = [
            f"{name}={before!r} would come back as {after!r}"
            for name in self.__dataclass_fields__
            if name not in OURS_ALONE and name != "hf_extra"
            for before, after in [(getattr(self, name), getattr(again, name))]
            if before != after
        ]
        if lost:
            raise ConfigError(
                path=f"{type(self).__name__}.to_hf",
                expected=f"options that a {self.model_type!r} config.json can express",
                found="; ".join(lost),
                next_step="change these options, or choose a model_type that has them",
            )
        return data

    @classmethod
    def from_hf(cls, data: Mapping[str, Any]) -> Self:
        """Return the config of a config.json of a known family.

        Raises:
            ConfigError: the family is unknown, or the file has options that the decoder lacks.
        """
        family = registry.family(str(data.get("model_type")))
        options = family.read_options(data)
        try:
            return cls(**options)
        except ConfigError as exc:
            said = {name: key for name, key in family.keys.items() if name in str(exc.found)}
            raise ConfigError(
                path=f"config.json of a {family.model_type!r} model",
                expected=exc.expected,
                found=exc.found,
                next_step="correct these fields"
                + "".join(f"; {name} is {key} there" for name, key in said.items()),
            ) from exc

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        if name not in _NESTED or value is None:
            return super()._from_json(name, value)
        try:
            return _NESTED[name](**{key: tuples(entry) for key, entry in value.items()})
        except (AttributeError, TypeError) as exc:
            raise ConfigError(
                path=f"{cls.__name__}.from_dict: {name}",
                expected=f"the fields of {_NESTED[name].__name__}",
                found=str(exc),
                next_step="load it with the version of Cairn that wrote it",
            ) from exc


_LATER = (
    *("norm", "norm_bias", "block", "shared_norm", "qk_norm", "sliding_window", "layer_types"),
    *("window_rope", "layers_without_rope", "attention_scale", "attention_soft_cap"),
    *("attention_sinks", "latent", "learned_positions", "gated_mlp", "activation_limit"),
    *("experts", "embedding_scale", "residual_scale", "logit_scale", "logit_soft_cap"),
)
_DEFAULTS = {
    entry.name: jsonable(entry.default)
    for entry in dataclasses.fields(DecoderConfig)
    if entry.name in _LATER
}
_LATER_ROPE = (
    *("rotary_fraction", "beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"),
    *("attention_factor", "short_factor", "long_factor"),
)


def _is_size(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < math.inf


_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Any], bool], str], ...] = (
    (_FLAGS, lambda value: isinstance(value, bool), "True or False"),
    (("rms_norm_eps", "initializer_range", *_SCALES), _is_size, "numbers, 0 or more"),
    (
        _POSITIVE_OR_NONE,
        lambda value: value is None or (_is_size(value) and value != 0),
        "positive numbers, or None",
    ),
)
"""Checks of fields: the names, a function that accepts right values, and their description."""


def _is_positive_int(value: object) -> bool:
    return is_integer(value) and value > 0
