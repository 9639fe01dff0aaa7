"""A family's GGUF file as a table: the key of config.json for each key of its metadata.

Sources: the GGUF specification; llama.cpp's converter and what it reads; the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cairn.interop.config.decoder import FULL, WINDOW, DecoderConfig
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.conversion.rules import RuleTable
from cairn.interop.errors import ConfigError
from cairn.interop.families.gguf_engine import Engine
from cairn.interop.families.gguf_rope import ROPE_KEYS, rope_from_gguf
from cairn.interop.families.hf_config import required
from cairn.interop.families.names import Names

__all__ = [
    "GGUF_WINDOW_BASE",
    "GGUFContent",
    "GGUFForm",
    "gguf_sizes",
    "gguf_window_layers",
    "gguf_windows",
    "refuse_own_head",
]

_HEADS, _KV_HEADS = "attention.head_count", "attention.head_count_kv"
_KEY, _VALUE, _TURNING = "attention.key_length", "attention.value_length", "rope.dimension_count"
_PATTERN = "attention.sliding_window_pattern"
GGUF_WINDOW_BASE = "rope.freq_base_swa"
"""Metadata key: base of the rotary positions of layers with a window."""
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_ALWAYS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "expert_count": (0,),
        "expert_gating_func": (1,),  # softmax
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        "expert_used_count": (0,),
        "expert_weights_scale": (0.0, 1.0),
        "nextn_predict_layers": (0,),
    }
)
"""Keys -> values with which a file is accepted though its family does not read the key."""
_SIZES = frozenset(
    {
        *("block_count", "context_length", "embedding_length", _HEADS, _KV_HEADS, _KEY, _VALUE),
        *(_TURNING, "rope.scaling.original_context_length"),
    }
)
_TEXTS = frozenset({"rope.scaling.type", "tensor_data_layout"})
_HARMLESS = frozenset({"rope.scaling.finetuned", "vocab_size"})


@dataclass(frozen=True)
class GGUFContent:
    """Content of a GGUF file that `GGUFForm` reads.

    Attributes:
        metadata: the architecture's metadata, by keys without the architecture's prefix.
        shapes: the tensors' shapes in NumPy's order, by name.
        read: returns the tensor of a name, as float32.
    """

    metadata: Mapping[str, Any]
    shapes: Mapping[str, Shape]
    read: Callable[[str], Array]


def gguf_sizes(**changes: str) -> dict[str, str]:
    """Return the required metadata keys -> keys of config.json.

    Args:
        **changes: usual key of config.json -> this family's key, or "" if it has none. `layer_norm`
            is the key of the epsilon in families with LayerNorm.
    """
    layer_norm = changes.pop("layer_norm", None)
    usual = {
        "block_count": "num_hidden_layers",
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        _HEADS: "num_attention_heads",
        **(_RMS if layer_norm is None else {"attention.layer_norm_epsilon": layer_norm}),
    }
    own = {key: changes.get(name, name) for key, name in usual.items()}
    return {key: name for key, name in own.items() if name}


@dataclass(frozen=True)
class GGUFForm:
    """Mapping of a family's options to the metadata and tensors of a GGUF file.

    Attributes:
        architecture: value of "general.architecture".
        names: llama.cpp's names of the layers, or a function from the config to them; weights are
            [out, in] in NumPy's order.
        sizes: required metadata keys -> keys of config.json.
        options: optional metadata keys -> keys of config.json.
        flags: keys of config.json -> the tensor whose presence makes them true.
        fixed: keys of config.json that follow from the architecture -> their values.
        only: metadata keys -> the accepted values; an absent key is accepted too.
        also_read: metadata keys that `read` reads.
        read: function (content, config.json so far) -> keys of config.json to add or replace.
        write: function (config, config.json) -> metadata keys to add, for what `read` reads.
        heads: key of config.json for the number of key/value heads; None: as many as query heads.
        head_dim: key of config.json for a head's size; None: it is width / heads.
        rope: whether the form reads rotary positions; False: there are none, or `read` reads them.
        part_turns: whether "rope.dimension_count" may be less than a head's size.
        engine: what llama.cpp supports for the architecture; models with other options are not
            written.
        fits: whether a file is of this family, where several families share the architecture.
    """

    architecture: str
    names: Names | Callable[[DecoderConfig], Names]
    sizes: Mapping[str, str] = field(default_factory=gguf_sizes)
    options: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    also_read: frozenset[str] = frozenset()
    read: Callable[[GGUFContent, dict[str, Any]], Mapping[str, Any]] | None = None
    write: Callable[[DecoderConfig, Mapping[str, Any]], Mapping[str, Any]] | None = None
    heads: str | None = "num_key_value_heads"
    head_dim: str | None = "head_dim"
    rope: bool = True
    part_turns: bool = False
    engine: Engine = field(default_factory=Engine)
    fits: Callable[[GGUFContent], bool] = lambda content: True

    def rules(self, config: DecoderConfig) -> RuleTable:
        """Return the rule table between the model's leaves and GGUF's tensors."""
        names = self.names if isinstance(self.names, Names) else self.names(config)
        return names.rules(config)

    def config(self, content: GGUFContent, model_type: str) -> dict[str, Any]:
        """Return the config.json that a GGUF file stands for.

        Raises:
            ConfigError: keys are missing, are not read, or ask for something that the decoder can't
                do; all are named.
        """
        where = f"metadata of a {self.architecture!r} GGUF"
        metadata = {key: _merge_layers(key, value) for key, value in content.metadata.items()}
        content = GGUFContent(metadata, content.shapes, content.read)
        sizes = required(metadata, tuple(self.sizes), where)
        if "token_embd.weight" not in content.shapes:
            raise _refusal(where, ["no token_embd.weight"])
        heads, width = metadata[_HEADS], metadata["embedding_length"]
        refused = self._unread(metadata)
        no_numbers = _no_numbers(metadata)
        if no_numbers:
            raise _refusal(where, refused + no_numbers)
        data = dict(self.fixed)
        data |= {self.sizes[key]: value for key, value in sizes.items()}
        data |= {name: metadata[key] for key, name in self.options.items() if key in metadata}
        data |= {name: tensor in content.shapes for name, tensor in self.flags.items()}
        data["model_type"] = model_type
        data["tie_word_embeddings"] = "output.weight" not in content.shapes
        data["vocab_size"] = content.shapes["token_embd.weight"][0]
        groups = metadata.get(_KV_HEADS, heads)
        if self.heads is not None:
            data[self.heads] = groups
        elif _KV_HEADS not in self.also_read and groups != heads:
            refused.append(f"{_KV_HEADS}={groups!r}")
        if _KEY not in self.also_read:
            size = self._head_size(metadata)
            turning = metadata.get(_TURNING, size)
            if self.head_dim is not None:
                data[self.head_dim] = size
            elif size != width // heads:
                refused.append(f"{_KEY}={size!r}")
            if metadata.get(_VALUE, size) != size:
                refused.append(f"{_VALUE}={metadata[_VALUE]!r}")
            if turning != size and not (self.part_turns and self.rope):
                refused.append(f"{_TURNING}={turning!r}")
        else:
            size = turning = metadata.get(_TURNING)
        if self.rope:
            rope = rope_from_gguf(metadata, content.read, content.shapes, where)
            if turning != size or self.part_turns:  # some families turn a part where no key says it
                rope["partial_rotary_factor"] = _share(turning, size)
            data["rope_parameters"] = rope
        if refused:
            raise _refusal(where, refused)
        if self.read is not None:
            data |= self.read(content, data)
        return data

    def _head_size(self, metadata: Mapping[str, Any]) -> Any:
        usual = metadata["embedding_length"] // metadata[_HEADS]
        if not self.part_turns:
            usual = metadata.get(_TURNING, usual)
        return metadata.get(_KEY, usual)

    def _unread(self, metadata: Mapping[str, Any]) -> list[str]:
        """Return a line for each key that is not read or has an unsupported value."""
        rope = ROPE_KEYS if self.rope else frozenset()
        read = {*self.sizes, *self.options, *self.also_read, *rope}
        read |= {_KV_HEADS, _KEY, _VALUE, _TURNING}
        only = {key: values for key, values in _ALWAYS.items() if key not in read}
        only |= self.only
        refused = []
        for key, value in sorted(metadata.items()):
            if key in only:
                if value not in only[key]:
                    allowed = " or ".join(repr(choice) for choice in only[key])
                    refused.append(f"{key}={value!r} (only {allowed} is read)")
            elif key not in read and key not in _HARMLESS:
                refused.append(f"{key}={value!r} (nothing reads it)")
        return refused


def gguf_window_layers(content: GGUFContent, layers: int, period: int) -> list[str]:
    """Return `layer_types` of config.json: which layers have a window.

    They follow from the file's list or period; without them every `period`-th layer has no window.

    Args:
        content: content of the file.
        layers: number of layers.
        period: the architecture's period, for a file without list and period.
    """
    said = content.metadata.get(_PATTERN, period)
    if isinstance(said, list):
        windowed = [bool(is_windowed) for is_windowed in said]
    else:
        windowed = [said == 0 or layer % said < said - 1 for layer in range(layers)]
    return [WINDOW if is_windowed else FULL for is_windowed in windowed]


def gguf_windows(config: DecoderConfig, said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata about layers with a window: which they are, and their rotary base.

    Args:
        config: config of the model.
        said: ignored; it is here because `GGUFForm.write` passes it.
    """
    types = config.layer_types or (FULL,) * config.num_hidden_layers
    base = {} if config.window_rope is None else {GGUF_WINDOW_BASE: float(config.window_rope.theta)}
    return {_PATTERN: [kind == WINDOW for kind in types], **base}


def refuse_own_head(content: GGUFContent, architecture: str) -> None:
    """Raise ConfigError if a file has a head although its architecture uses the embedding as head.

    Raises:
        ConfigError: the file has a head.
    """
    if "output.weight" in content.shapes:
        raise ConfigError(
            path=f"tensors of a {architecture!r} GGUF",
            expected="no head, for the embedding is it",
            found="output.weight",
            next_step="use Hugging Face files: llama.cpp has no such model",
        )


def _merge_layers(key: str, value: Any) -> Any:
    """Return the number that a list repeats for each layer; any other value is unchanged."""
    alike = isinstance(value, list) and value and all(number == value[0] for number in value)
    return value[0] if alike and key != _PATTERN else value


def _no_numbers(metadata: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that must be a number and is not."""
    problems = []
    for key, value in sorted(metadata.items()):
        number = isinstance(value, int | float) and (key not in _SIZES or value >= 1)
        if not number and key not in _TEXTS and key != _PATTERN:
            problems.append(f"{key}={value!r}")
    return problems


def _share(turning: int, size: int) -> float:
    """Return a share of a head's size for which `int(share * size) == turning`."""
    share = turning / size
    return share if int(size * share) == turning else (turning + 0.5) / size


def _refusal(where: str, refused: list[str]) -> ConfigError:
    return ConfigError(
        path=where,
        expected="what the family's decoder does",
        found="; ".join(refused),
        next_step="use the model's safetensors instead",
    )
