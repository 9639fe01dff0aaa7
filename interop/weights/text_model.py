"""Text model of a multimodal repository: its config, and its tensors under their own names.

A multimodal model is a text model behind an encoder. config.json holds the text model's config as
`text_config`, and the names of its tensors begin with or contain `language_model`.

Source: transformers `conversion_mapping.py`, "llava", which most such models share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cairn.interop import registry
from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.conversion.boxes import Box
from cairn.interop.conversion.ops import Array, Shape
from cairn.interop.errors import ConfigError, ConversionError
from cairn.interop.families.family import get_family
from cairn.interop.weights.weight_source import RowSource

__all__ = ["RenamedTensors", "has_text_model", "is_headless", "text_config", "text_tensors"]

_WHOLE: Final = ("gemma3", "internvl", "llava", "llava_next", "mistral3")
"""Model types whose text model alone computes the same from text; tests check this.

It is not so for all: Aya Vision does not scale its logits as Command R does, and PaliGemma attends
to later tokens.
"""

_TEXT_CONFIG: Final = "text_config"
_INHERITED: Final = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("dtype", "quantization_config", "torch_dtype"),
)
"""Keys beside the parts' configs that apply to all parts."""

_TIED: Final = "tie_word_embeddings"

_PREFIXES: Final = ("language_model.model.", "model.language_model.")
"""Prefixes of the text model's layers: that of transformers before release 5, and that of later
releases.
"""

_HEAD: Final = re.compile(r"(language_model\.)?(lm_head\..*)")


@dataclass(frozen=True)
class RenamedTensors:
    """Source of some tensors of another source, under other names.

    Attributes:
        weights: the source.
        names: name here -> name in the source.
    """

    weights: RowSource
    names: Mapping[str, str]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of every tensor."""
        return {name: self.weights.shapes[there] for name, there in self.names.items()}

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Dtype of every tensor."""
        return {name: self.weights.dtypes[there] for name, there in self.names.items()}

    def read(self, name: str) -> Array:
        """Return a whole tensor."""
        return self.weights.read(self.names[name])

    def rows(self, name: str, low: int, high: int) -> Array:
        """Return the rows of a tensor from `low` up to, not including, `high`."""
        return self.weights.rows(self.names[name], low, high)

    def cover(self, name: str, box: Box) -> Box:
        """Return the box that the source reads for `box`."""
        return self.weights.cover(self.names[name], box)

    def boxes(self, name: str, boxes: Sequence[Box]) -> list[Array]:
        """Return boxes of one tensor."""
        return self.weights.boxes(self.names[name], boxes)


def has_text_model(data: Mapping[str, Any]) -> bool:
    """Return whether a config.json has a `text_config` and is not of a class defined here."""
    is_own = data.get("model_type") in AutoEasyDeLConfig.known_model_types()
    return isinstance(data.get(_TEXT_CONFIG), Mapping) and not is_own


def text_config(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the config.json of the text model alone.

    Args:
        data: content of the multimodal model's config.json.
        path: the file, for messages.

    Raises:
        ConfigError: the model is not one of those whose text model computes the same alone, or the
            text model's family is unknown.
    """
    if data.get("model_type") not in _WHOLE:
        raise ConfigError(
            path=path,
            expected=f"a model of text alone, or of one of {', '.join(_WHOLE)}",
            found=repr(data.get("model_type")),
            next_step="what others compute of text may differ from what their text model does by "
            "itself: save that as a model of its own with transformers, and hold it against them",
        )
    text = dict(data[_TEXT_CONFIG])
    model_type = text.get("model_type")
    if not registry.is_family(model_type):
        raise ConfigError(
            path=f"{path}: {_TEXT_CONFIG}",
            expected=f"model_type to be one of {', '.join(registry.known_families())}",
            found=repr(model_type),
            next_step="its family has to be known: docs/howto/add-a-family.md",
        )
    family = get_family(str(model_type))
    inherited = {key: data[key] for key in _INHERITED if data.get(key) is not None}
    if data.get(_TIED) is not None:
        text[_TIED] = data[_TIED]
    text["architectures"] = [family.architecture]
    return {**family.form.inner_sizes, **inherited, **text}


def is_headless(weights: RowSource) -> bool:
    """Return whether a text model has no head tensor: then the embedding is its head.

    config.json is no help: versions of transformers put `tie_word_embeddings` in different places.
    """
    return not any(_HEAD.fullmatch(name) for name in weights.shapes)


def text_tensors(weights: RowSource, path: str) -> RenamedTensors:
    """Return the text model's tensors, with the names that a plain text model would have.

    Args:
        weights: source of the multimodal model's tensors.
        path: the folder, for messages.

    Raises:
        ConversionError: there are no such tensors, or their names have both prefixes.
    """
    prefixes = {
        prefix for prefix in _PREFIXES for name in weights.shapes if name.startswith(prefix)
    }
    if len(prefixes) != 1:
        raise ConversionError(
            path=path,
            expected=f"tensors of a text model below {' or '.join(_PREFIXES)}",
            found="some below each" if prefixes else f"{len(weights.shapes)} others",
            next_step="take the folder as it was published, or save it with transformers anew",
        )
    (prefix,) = prefixes
    names = {}
    for name in weights.shapes:
        if name.startswith(prefix):
            names[f"model.{name.removeprefix(prefix)}"] = name
        elif head := _HEAD.fullmatch(name):
            names[head[2]] = name
    return RenamedTensors(weights, names)
