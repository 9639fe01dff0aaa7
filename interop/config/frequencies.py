"""Frequencies of rotary positions, and the scalings that stretch them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cairn.interop.config.rope import RopeConfig

Frequencies = np.ndarray[Any, np.dtype[np.float32]]

_BETA_FAST, _BETA_SLOW = 32.0, 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int, *, long: bool = False) -> Frequencies:
    """Return the radians per token for each pair of a head's rotated dimensions.

    The scaling "dynamic" also depends on the sequence's length; this function ignores that.

    Args:
        rope: the rotary positions.
        head_dim: number of a head's dimensions to which `rotary_fraction` refers.
        long: for "longrope": return the frequencies of sequences beyond the original length.

    Returns:
        Shape (rotary dimensions / 2,).

    Source: arXiv 2104.09864; "llama3" is Meta's smooth blend between kept and divided
    frequencies, as in transformers `_compute_llama3_parameters`; "yarn" is arXiv 2309.00071,
    "longrope" arXiv 2402.13753.
    """
    dims = rope.rotary_dim(head_dim)
    exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
    # Rounded to float32 here, as transformers does, before any scaling.
    kept = (1.0 / rope.theta**exponents).astype(np.float32)
    if rope.scaling == "linear":
        return kept / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return (kept / llama3_divisors(rope, kept)).astype(np.float32)
    if rope.scaling == "yarn":
        share = _yarn_kept_share(rope, dims)
        return (kept / rope.factor * (1 - share) + kept * share).astype(np.float32)
    if rope.scaling == "longrope":
        divisors = (rope.long_factor if long else rope.short_factor) or ()
        return (kept / np.asarray(divisors, np.float32)).astype(np.float32)
    return kept


def attention_factor(rope: RopeConfig) -> float:
    """Return the factor by which cosines and sines are multiplied.

    Source: transformers `_compute_yarn_parameters` and `_compute_longrope_parameters`.
    """
    if rope.scaling not in ("yarn", "longrope"):
        return 1.0
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.scaling == "longrope":
        length = rope.original_max_position_embeddings or 1
        return math.sqrt(1 + math.log(rope.factor) / math.log(length)) if rope.factor > 1 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
    return yarn_mscale(rope.factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor on attention for a context that is `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def llama3_divisors(rope: RopeConfig, kept: Frequencies) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return Llama 3's divisor of each frequency: 1 for short waves, `factor` for long ones."""
    low, high = rope.low_freq_factor or 1.0, rope.high_freq_factor or 1.0
    length = rope.original_max_position_embeddings or 1
    wavelengths = 2 * math.pi / kept.astype(np.float64)
    kept_share = np.clip((length / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - kept_share) / rope.factor + kept_share)


def _yarn_kept_share(rope: RopeConfig, dims: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the share of each frequency that is kept: 1 for short waves, 0 for long ones."""
    length = rope.original_max_position_embeddings or 1

    def dimension(turns: float) -> float:
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast or _BETA_FAST), dimension(rope.beta_slow or _BETA_SLOW)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(dims // 2, dtype=np.float64) - low) / (high - low)
    return 1.0 - np.clip(ramp, 0.0, 1.0)
