"""The text model of a repository that has more: its config, and its tensors by their own names.

JAX-free. Models that see or hear are a text model behind an encoder: config.json has the former as
`text_config`, and the tensors of it lie below `language_model`.

Source: transformers `conversion_mapping.py`, "llava", which most such models share.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from cairn.state import registry
from cairn.state.config import AutoEasyDeLConfig
from cairn.state.conversion import Array, Box, Shape
from cairn.state.errors import ConfigError, ConversionError
from cairn.state.families import get_family
from cairn.state.weights.weight_source import RowSource

__all__ = ["Renamed", "has_text_part", "is_headless", "text_config", "text_tensors"]

_WHOLE: Final = ("gemma3", "internvl", "llava", "llava_next", "mistral3")
"""Models that compute of text what their text model computes by itself, as tests hold. Not all do:
Aya Vision does not scale its logits as Command R does, and PaliGemma sees what comes after."""

_TEXT_CONFIG: Final = "text_config"
_INHERITED: Final = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("dtype", "quantization_config", "torch_dtype"),
)
"""Keys that are said of all parts, beside them."""

_TIED: Final = "tie_word_embeddings"

_PREFIXES: Final = ("language_model.model.", "model.language_model.")
"""What a release before the fifth of transformers puts before the names of the text model's layers,
and what later ones do."""

_HEAD: Final = re.compile(r"(language_model\.)?(lm_head\..*)")


@dataclass(frozen=True)
class Renamed:
    """Some tensors of a source, by other names.

    Attributes:
        weights: the source.
        names: of each tensor here -> there.
    """

    weights: RowSource
    names: Mapping[str, str]

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape."""
        return {name: self.weights.shapes[there] for name, there in self.names.items()}

    @property
    def dtypes(self) -> Mapping[str, np.dtype[Any]]:
        """Every tensor's dtype."""
        return {name: self.weights.dtypes[there] for name, there in self.names.items()}

    def read(self, name: str) -> Array:
        """One tensor, whole."""
        return self.weights.read(self.names[name])

    def rows(self, name: str, low: int, high: int) -> Array:
        """Some rows of a tensor."""
        return self.weights.rows(self.names[name], low, high)

    def cover(self, name: str, box: Box) -> Box:
        """What is read of a tensor where a box of it is wanted."""
        return self.weights.cover(self.names[name], box)

    def boxes(self, name: str, wanted: Sequence[Box]) -> list[Array]:
        """Boxes of one tensor."""
        return self.weights.boxes(self.names[name], wanted)


def has_text_part(data: Mapping[str, Any]) -> bool:
    """Whether config.json is of a model that has a text model, and more; not of a class of ours."""
    known = data.get("model_type") in AutoEasyDeLConfig.known_model_types()
    return isinstance(data.get(_TEXT_CONFIG), Mapping) and not known


def text_config(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The config.json of the text model alone.

    Args:
        data: of the whole.
        path: of the file, for messages.

    Raises:
        ConfigError: it is not known to compute of text what its text model does, or that is of a
            family that is not known.
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
    """Whether a text model has no head of its own: the embedding is it, whatever config.json says.

    Which of two config.jsons, one in the other, says that has changed over time.
    """
    return not any(_HEAD.fullmatch(name) for name in weights.shapes)


def text_tensors(weights: RowSource, path: str) -> Renamed:
    """The text model's tensors by the names that they have in a model of their own.

    Args:
        weights: of the whole.
        path: of the folder, for messages.

    Raises:
        ConversionError: there are none, or they are named in two ways.
    """
    found = {prefix for prefix in _PREFIXES for name in weights.shapes if name.startswith(prefix)}
    if len(found) != 1:
        raise ConversionError(
            path=path,
            expected=f"tensors of a text model below {' or '.join(_PREFIXES)}",
            found="some below each" if found else f"{len(weights.shapes)} others",
            next_step="take the folder as it was published, or save it with transformers anew",
        )
    (prefix,) = found
    names = {}
    for name in weights.shapes:
        if name.startswith(prefix):
            names[f"model.{name.removeprefix(prefix)}"] = name
        elif head := _HEAD.fullmatch(name):
            names[head[2]] = name
    return Renamed(weights, names)
