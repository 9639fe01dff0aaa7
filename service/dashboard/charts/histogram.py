"""Histogram of a tensor's elements as bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cairn.service.schemas import Histogram

WIDTH: Final = 400
HEIGHT: Final = 160
_FLOOR: Final = 138


@dataclass(frozen=True)
class Bar:
    """Drawing of a bin of a histogram."""

    x: float
    y: float
    width: float
    height: float
    title: str


@dataclass(frozen=True)
class Bars:
    """Drawing, and the ends of its axis."""

    bars: tuple[Bar, ...]
    first: float
    last: float
    most: int
    floor: int = _FLOOR
    full_width: int = WIDTH
    full_height: int = HEIGHT


def bars_of(histogram: Histogram) -> Bars | None:
    """Draw a histogram; return None if it is empty, or if its numbers exceed float64."""
    if isinstance(histogram.start, str):
        return None
    counts: Sequence[int] = histogram.counts
    most = max(counts, default=0)
    if most == 0:
        return None
    wide = WIDTH / len(counts)
    bars = [
        Bar(
            round(at * wide, 2),
            round(_FLOOR - high, 2),
            round(max(1.0, wide - 1), 2),
            round(high, 2),
            f"{left:.4g} to {left + histogram.width:.4g}: {count}",
        )
        for at, count in enumerate(counts)
        for left in [histogram.start + at * histogram.width]
        for high in [max(1.0, (_FLOOR - 10) * count / most) if count else 0.0]
    ]
    return Bars(tuple(bars), histogram.start, histogram.start + len(counts) * histogram.width, most)
