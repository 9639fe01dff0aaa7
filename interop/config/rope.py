"""Config of rotary positions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["ROPE_SCALINGS", "RopeConfig"]

ROPE_SCALINGS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")

_LENGTH = "original_max_position_embeddings"
_NEEDED: dict[str, tuple[str, ...]] = {
    "dynamic": (_LENGTH,),
    "llama3": ("low_freq_factor", "high_freq_factor", _LENGTH),
    "yarn": (_LENGTH,),
    "longrope": ("short_factor", "long_factor", _LENGTH),
}


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary positions: base frequency and how it is stretched to longer contexts.

    Attributes:
        theta: base of the frequencies.
        scaling: one of `ROPE_SCALINGS`.
        factor: context extension (every scaling but "default").
        low_freq_factor: llama3: frequencies are divided by `factor` if their wavelength is above
            `original_max_position_embeddings / low_freq_factor`.
        high_freq_factor: llama3: frequencies are kept if their wavelength is below
            `original_max_position_embeddings / high_freq_factor`.
        original_max_position_embeddings: context length of pretraining, in tokens (dynamic,
            llama3, yarn, longrope).
        rotary_fraction: share of each head's dimensions that are rotated; they are the first ones.
        beta_fast: yarn: frequencies with more turns than this within the original length are kept;
            None means 32.
        beta_slow: yarn: frequencies with fewer turns than this are divided by `factor`; None means
            1.
        truncate: yarn: whether the two bounds are rounded to whole dimensions.
        mscale: yarn: a coefficient of the default of `attention_factor`.
        mscale_all_dim: yarn: the other coefficient of that default; it also scales DeepSeek's
            attention.
        attention_factor: yarn, longrope: factor on cosines and sines; None: it follows from
            `factor` (and, for yarn, `mscale` and `mscale_all_dim`).
        short_factor: longrope: divisor of each frequency for sequences up to the original length.
        long_factor: longrope: divisor of each frequency for longer sequences.
    """

    theta: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    rotary_fraction: float = 1.0
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of rotated dimensions of a head."""
        return int(head_dim * self.rotary_fraction)

    def problems(self, head_dim: int) -> list[str]:
        """Return everything wrong with the values, for heads with `head_dim` dimensions."""
        problems = []
        if self.scaling not in ROPE_SCALINGS:
            problems.append(f"rope scaling {self.scaling!r} is none of {', '.join(ROPE_SCALINGS)}")
        if not all(_is_positive(size) for size in (self.theta, self.factor)):
            problems.append(
                f"rope theta {self.theta!r} and factor {self.factor!r} must be positive"
            )
        if not _is_positive(self.rotary_fraction) or self.rotary_fraction > 1:
            return [*problems, f"rope rotary_fraction {self.rotary_fraction!r} must be in (0, 1]"]
        missing = [name for name in _NEEDED.get(self.scaling, ()) if not getattr(self, name)]
        if missing:
            return [*problems, f"rope scaling {self.scaling!r} needs {', '.join(missing)}"]
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.scaling == "llama3" and low is not None and high is not None and not low < high:
            problems.append(f"rope low_freq_factor {low} must be below high_freq_factor {high}")
        turning = self.rotary_dim(head_dim)
        if turning < 2 or turning % 2:
            problems.append(
                f"{turning} of head_dim {head_dim} turn: an even number of dimensions must, "
                "for rotary positions"
            )
        for name in ("short_factor", "long_factor"):
            factors: Any = getattr(self, name)
            if factors is not None and len(factors) != turning // 2:
                problems.append(f"rope {name} has {len(factors)} numbers, not {turning // 2}")
        return problems


def _is_positive(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf
