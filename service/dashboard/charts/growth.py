"""Chart of the bytes of a run over time."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from cairn.service.schemas import StepUsage

WIDTH: Final = 1000
HEIGHT: Final = 104
_TOP: Final = 2
_FLOOR: Final = 102


@dataclass(frozen=True)
class Growth:
    """Drawing of the growth: the area under a staircase.

    Attributes:
        path: SVG path of the area.
        first, last: Times of the first and the last step.
        nbytes: Bytes of the run after the last step.
        per_day: Average growth in bytes per day; None if unknown.
    """

    path: str
    first: datetime
    last: datetime
    nbytes: int
    per_day: float | None
    width: int = WIDTH
    height: int = HEIGHT
    floor: int = _FLOOR


def growth(steps: Sequence[StepUsage]) -> Growth | None:
    """Draw the growth of a run by the times of its steps.

    Return None if fewer than two steps have a time, if all have the same one, or if they add no
    bytes.
    """
    saved = [(step.created, step.added) for step in steps if step.created is not None]
    if len(saved) < 2:
        return None
    saved.sort(key=lambda step: step[0])
    first, last = saved[0][0], saved[-1][0]
    span = (last - first).total_seconds()
    total = sum(size for _, size in saved)
    if span <= 0 or total <= 0:
        return None
    together, path = 0, f"M0 {_FLOOR}"
    for when, size in saved:
        x = WIDTH * (when - first).total_seconds() / span
        path += f"H{x:.1f}"
        together += size
        path += f"V{_FLOOR - (_FLOOR - _TOP) * together / total:.1f}"
    path += f"V{_FLOOR}Z"
    # The first step's bytes exist when the span begins, so they are no growth within it.
    per_day = (total - saved[0][1]) / span * 86_400
    return Growth(path, first, last, total, per_day)
