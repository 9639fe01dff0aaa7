"""Options that llama.cpp supports for an architecture; models with others are not written.

Source: llama.cpp, `src/models`: the tensors that each architecture creates, and its graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cairn.interop.config.decoder import FULL, WINDOW, DecoderConfig
from cairn.interop.config.frequencies import inverse_frequencies
from cairn.interop.config.rope import RopeConfig
from cairn.interop.errors import ConfigError

__all__ = ["LLAMA_ENGINE", "Engine", "loadable", "no_gguf_file"]

_BY_NUMBERS = frozenset({"llama3", "longrope"})
"""Rotary scalings that a file stores as tensors."""


@dataclass(frozen=True)
class Engine:
    """What llama.cpp's code for an architecture supports.

    Attributes:
        options: options of the decoder -> the values that it supports.
        needs_head: it loads no file without "output.weight", so a tied head is written too.
        windows: whether layers may have a window.
        window_bases: whether layers with a window may have a rotary base of their own.
        wide_heads: whether a head's size may differ from width / heads.
        scalings: rotary scalings stored as tensors that it loads.
        problems: returns a line for each further option that it does not support.
    """

    options: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    needs_head: bool = False
    windows: bool = False
    window_bases: bool = False
    wide_heads: bool = False
    scalings: frozenset[str] = frozenset()
    problems: Callable[[DecoderConfig], list[str]] = lambda config: []


LLAMA_ENGINE = Engine(wide_heads=True, scalings=_BY_NUMBERS)
"""Support of the architecture "llama", and of those derived from its code."""


def loadable(engine: Engine, config: DecoderConfig, architecture: str) -> DecoderConfig:
    """Return the config in a form that llama.cpp can load, with the same computation.

    Args:
        engine: what llama.cpp supports for the architecture.
        config: config of the model.
        architecture: name of the architecture, for the message.

    Raises:
        ConfigError: llama.cpp does not support some options; all are named.
    """
    if not engine.windows and not _windows_matter(config):
        config = config.replace(
            sliding_window=None,
            layer_types=config.layer_types and (FULL,) * config.num_hidden_layers,
        )
    width = config.hidden_size
    if engine.needs_head:
        config = config.replace(tie_word_embeddings=False)
    refused = [
        f"{name}={getattr(config, name)!r} (only {' or '.join(map(repr, values))})"
        for name, values in engine.options.items()
        if getattr(config, name) not in values
    ]
    refused += engine.problems(config)
    if not engine.windows and _windows_matter(config):
        refused.append(
            f"sliding_window={config.sliding_window} below max_position_embeddings="
            f"{config.max_position_embeddings} (there are no windows)"
        )
    heads = f"num_attention_heads={config.num_attention_heads}, head_dim={config.head_size}"
    if not engine.wide_heads and config.num_attention_heads * config.head_size != width:
        refused.append(f"{heads} (only heads that together are as wide as the model: {width})")
    if config.head_size == 1:
        refused.append(f"{heads} (heads of one number end the process)")
    rope, local = config.rope, config.window_rope
    if rope and local and local.theta != rope.theta and not engine.window_bases:
        refused.append(
            f"rope_theta={local.theta:g} of layers with a window (only that of the others: "
            f"{rope.theta:g})"
        )
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
    """Return the error for a model that can't be written as a GGUF file."""
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
    """Return whether a layer has a window that is shorter than the longest sequence."""
    window, types = config.sliding_window, config.layer_types
    some = types is None or WINDOW in types
    return window is not None and window < config.max_position_embeddings and some
