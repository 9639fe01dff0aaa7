"""Frequencies of rotary positions, and the scalings that stretch them. NumPy only."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cairn.state.config.decoder import RopeConfig

Frequencies = np.ndarray[Any, np.dtype[np.float32]]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Frequencies:
    """Radians per token for each pair of a head's dimensions; shape (head_dim / 2,).

    Source: arXiv 2104.09864; "llama3" is Meta's smooth blend between kept and divided
    frequencies, as in transformers `_compute_llama3_parameters`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    # Rounded to float32 here, as transformers does, before any scaling.
    kept = (1.0 / rope.theta**exponents).astype(np.float32)
    if rope.scaling == "linear":
        return kept / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return (kept / llama3_divisors(rope, kept)).astype(np.float32)
    return kept


def llama3_divisors(rope: RopeConfig, kept: Frequencies) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each frequency is divided by: 1 for short waves, `factor` for long ones."""
    low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 1.0
    length = rope.original_max_position_embeddings or 1
    wavelengths = 2 * math.pi / kept.astype(np.float64)
    kept_share = np.clip((length / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - kept_share) / rope.factor + kept_share)
