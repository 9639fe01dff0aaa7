"""Description of a model for the import of an Orbax checkpoint with other leaf paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cairn.interop.config.auto import AutoEasyDeLConfig
from cairn.interop.config.base import EDPretrainedConfig
from cairn.interop.config.decoder import DecoderConfig
from cairn.interop.config.decoder_layers import leaf_shapes
from cairn.interop.errors import ConfigError
from cairn.storage.orbax_import.model_map import ModelMap
from cairn.storage.runs.records.manifest import ModelInfo

__all__ = ["model_map"]


def model_map(config: EDPretrainedConfig | Mapping[str, Any], rules: Mapping[str, str]) -> ModelMap:
    r"""Return a `ModelMap` for `adopt`: a model's description, and where its leaves are stored.

    Args:
        config: the model's config, or the content of a Hugging Face config.json.
        rules: regular expressions of whole stored paths, such as
            `r"state/params/layers_([0-9]+)/attn/query/kernel"`, -> the model's path, such as
            `r"model/layers/\1/self_attn/q_proj/kernel"`. The first match counts.

    Raises:
        ConfigError: the config is of no known family, or can't be read.
        PolicyError: a rule is no regular expression.
    """
    parsed = config if isinstance(config, EDPretrainedConfig) else AutoEasyDeLConfig.from_hf(config)
    if not isinstance(parsed, DecoderConfig):
        raise ConfigError(
            path="config",
            expected="that of a family whose leaves a config describes",
            found=type(parsed).__name__,
            next_step="adopt the folder without a map; `cairn.load` reads it",
        )
    info = ModelInfo(
        model_type=parsed.model_type, model_class="DecoderForCausalLM", config=parsed.to_dict()
    )
    return ModelMap(info, leaf_shapes(parsed), dict(rules))
