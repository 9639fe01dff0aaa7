"""Options of an architecture in llama.cpp: files of anything else are not written.

Source: llama.cpp, `src/models`: the tensors that each architecture creates, and its graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cairn.interop.config.decoder import FULL, WINDOW, DecoderConfig
from cairn.interop.config.frequencies import inverse_frequencies
from cairn.interop.config.rope import RopeConfig
from cairn.interop.errors import ConfigError

__all__ = ["LLAMA_ENGINE", "Engine", "loadable", "no_gguf_file"]

_BY_NUMBERS = frozenset({"llama3", "longrope"})
"""Scalings of rotary positions that lie in a file as tensors."""


@dataclass(frozen=True)
class Engine:
    """Operations in the graph of an architecture, and which tensors it loads.

    Attributes:
        options: options of the decoder -> the only values for which there are code and tensors.
        needs_head: no file is loaded without "output.weight": a tied head is written too.
        windows: layers may have windows.
        wide_heads: a head may have another size than width / heads.
        scalings: of those that lie in tensors, the scalings of rotary positions that are loaded.
    """

    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    needs_head: bool = False
    windows: bool = False
    wide_heads: bool = False
    scalings: frozenset[str] = frozenset()


LLAMA_ENGINE = Engine(wide_heads=True, scalings=_BY_NUMBERS)
"""The architecture "llama", and those made after it."""


def loadable(engine: Engine, config: DecoderConfig, architecture: str) -> DecoderConfig:
    """Return the model as llama.cpp can compute it, without options that change nothing.

    Args:
        engine: what it has for the architecture.
        config: of the model.
        architecture: its name.

    Raises:
        ConfigError: it has no code or no tensors for some options; all are named.
    """
    if not engine.windows and not _windows_matter(config):
        config = config.replace(
            sliding_window=None,
            layer_types=config.layer_types and (FULL,) * config.num_hidden_layers,
        )
    if engine.needs_head:
        config = config.replace(tie_word_embeddings=False)
    refused = [
        f"{name}={getattr(config, name)!r} (only {' or '.join(map(repr, values))})"
        for name, values in engine.options.items()
        if getattr(config, name) not in values
    ]
    if not engine.windows and _windows_matter(config):
        refused.append(
            f"sliding_window={config.sliding_window} below max_position_embeddings="
            f"{config.max_position_embeddings} (there are no windows)"
        )
    usual = config.hidden_size // config.num_attention_heads
    if not engine.wide_heads and config.head_size != usual:
        refused.append(f"head_dim={config.head_size} (only width / heads: {usual})")
    rope = config.rope
    scaling = None if rope is None else rope.scaling
    if scaling in _BY_NUMBERS and scaling not in engine.scalings:
        refused.append(f"rotary positions of the kind {scaling!r} (there is no tensor for them)")
    if rope is not None and scaling == "yarn":
        if _yarn_as_usual(rope, config.rotary_size):
            config = config.replace(rope=dataclasses.replace(rope, truncate=True))
        else:
            refused.append(
                f"YaRN with beta_fast={rope.beta_fast}, beta_slow={rope.beta_slow}, truncate="
                f"{rope.truncate} (32, 1 and True are taken always: other frequencies)"
            )
    if refused:
        raise no_gguf_file(config, f"what llama.cpp's {architecture!r} has", "; ".join(refused))
    return config


def no_gguf_file(config: DecoderConfig, expected: str, found: str) -> ConfigError:
    """Return the error of a model of which no GGUF file is written."""
    return ConfigError(
        path=f"{config.model_type} as GGUF",
        expected=expected,
        found=found,
        next_step="export Hugging Face files instead (format 'huggingface')",
    )


def _yarn_as_usual(rope: RopeConfig, head_dim: int) -> bool:
    """Return whether llama.cpp's own YaRN bounds give the same frequencies."""
    usual = dataclasses.replace(rope, beta_fast=None, beta_slow=None, truncate=True)
    own, expected = inverse_frequencies(rope, head_dim), inverse_frequencies(usual, head_dim)
    return bool(np.allclose(own, expected, rtol=1e-6, atol=0))


def _windows_matter(config: DecoderConfig) -> bool:
    """Return whether a layer has a window that a text may exceed."""
    window, types = config.sliding_window, config.layer_types
    some = types is None or WINDOW in types
    return window is not None and window < config.max_position_embeddings and some
