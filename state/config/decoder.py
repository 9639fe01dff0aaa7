"""The decoder's options. A family is a choice of them; JAX-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

from cairn.state import registry
from cairn.state.config.base import EDPretrainedConfig, jsonable
from cairn.state.errors import ConfigError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
ROPE_SCALINGS = ("default", "linear", "llama3")

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
"""Fields that say how a model runs, not what it is: no family writes them."""


_FLAGS = (
    *("attention_bias", "attention_out_bias", "mlp_bias", "tie_word_embeddings"),
    *("scan_layers", "remat", "shard_attention_computation"),
)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions: base frequency and how it is stretched to longer contexts.

    Attributes:
        theta: base of the frequencies.
        scaling: one of `ROPE_SCALINGS`.
        factor: context extension (linear, llama3).
        low_freq_factor: llama3: wavelengths above original length / this are divided by `factor`.
        high_freq_factor: llama3: wavelengths below original length / this are kept.
        original_max_position_embeddings: llama3: context length of pretraining, in tokens.
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def problems(self) -> list[str]:
        """Everything wrong with the values."""
        found = []
        if self.scaling not in ROPE_SCALINGS:
            found.append(f"rope scaling {self.scaling!r} is none of {', '.join(ROPE_SCALINGS)}")
        if not all(_is_size(size) and size > 0 for size in (self.theta, self.factor)):
            found.append(f"rope theta {self.theta!r} and factor {self.factor!r} must be positive")
        if self.scaling == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            if not low or not high or not self.original_max_position_embeddings:
                found.append(
                    "rope scaling 'llama3' needs low_freq_factor, high_freq_factor and "
                    f"original_max_position_embeddings, found {self}"
                )
            elif not low < high:
                found.append(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
        return found


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(EDPretrainedConfig):
    """Shape and options of `DecoderForCausalLM`; names follow Hugging Face's where they exist.

    Attributes:
        model_type: the family, which knows how to read and write Hugging Face's form.
        num_key_value_heads: heads of keys and values; None means as many as query heads.
        head_dim: size of one head; None means `hidden_size // num_attention_heads`.
        hidden_act: one of `ACTIVATIONS`.
        attention_bias: biases on the query, key and value projections.
        attention_out_bias: a bias on the attention's output projection.
        mlp_bias: biases on the MLP's projections.
        tie_word_embeddings: the output head is the embedding, transposed.
        initializer_range: standard deviation of new weights.
        scan_layers: trace one block and scan it over the layers (compiles once); leaves stay
            unrolled outside the traced function.
        remat: recompute each block in the backward pass instead of keeping its activations.
        shard_attention_computation: False keeps the heads and tokens of attention whole on every
            device, whatever the parameters' placement; only rows are split.
        hf_extra: keys of config.json that no option stands for (token ids, ...), given back by
            `to_hf` unchanged; they don't touch the computation and are no part of equality.
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
    rope: RopeConfig = RopeConfig()
    attention_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
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
        object.__setattr__(self, "hf_extra", jsonable(self.hf_extra))
        super().__post_init__()

    @property
    def kv_heads(self) -> int:
        """`num_key_value_heads`, resolved."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        """`head_dim`, resolved."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    def problems(self) -> list[str]:
        """Everything wrong with the fields' values."""
        found = super().problems()
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
            return [*found, f"these must be positive integers: {bad}"]
        for names, is_fitting, expected in (
            (_FLAGS, _is_flag, "True or False"),
            (("rms_norm_eps", "initializer_range"), _is_size, "numbers, 0 or more"),
        ):
            values = {name: getattr(self, name) for name in names}
            other = {name: value for name, value in values.items() if not is_fitting(value)}
            if other:
                found.append(f"these must be {expected}: {other}")
        if self.num_attention_heads % self.kv_heads:
            found.append(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.kv_heads}"
            )
        if self.head_size % 2:
            found.append(f"head_dim {self.head_size} must be even for rotary positions")
        if self.hidden_act not in ACTIVATIONS:
            found.append(f"hidden_act {self.hidden_act!r} is none of {', '.join(ACTIVATIONS)}")
        rope: Any = self.rope
        if not isinstance(rope, RopeConfig):
            return [*found, f"rope {rope!r} is no RopeConfig"]
        return found + rope.problems()

    def to_hf(self) -> dict[str, Any]:
        """The content of config.json for this family, without nulls.

        Raises:
            ConfigError: the family can't express one of the options; each is named.
        """
        family = registry.family(self.model_type)
        data = {name: one for name, one in family.write_config(self).items() if one is not None}
        # What is written is read again: an option that the family has no key for would come back
        # changed, and is refused instead of being dropped.
        carried = self.hf_extra.keys() - family.known_keys
        read = {name: one for name, one in data.items() if name not in carried}
        again = type(self)(**family.read_options(read))
        lost = [
            f"{name}={ours!r} would come back as {theirs!r}"
            for name in self.__dataclass_fields__
            if name not in OURS_ALONE and name != "hf_extra"
            for ours, theirs in [(getattr(self, name), getattr(again, name))]
            if ours != theirs
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
        """The options that a config.json of a known family stands for.

        Raises:
            ConfigError: the family is unknown, or the file asks for what the decoder can't do.
        """
        return cls(**registry.family(str(data.get("model_type"))).read_options(data))

    @classmethod
    def _from_json(cls, name: str, value: Any) -> Any:
        if name == "rope":
            try:
                return RopeConfig(**value)
            except TypeError as exc:
                raise ConfigError(
                    path=f"{cls.__name__}.from_dict: rope",
                    expected="the fields of RopeConfig",
                    found=str(exc),
                    next_step="load it with the version of Cairn that wrote it",
                ) from exc
        return super()._from_json(name, value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_size(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value < math.inf


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
