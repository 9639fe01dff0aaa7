"""Small charts beside text, as SVG. Sizes are attributes, since the CSP forbids inline styles."""

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from markupsafe import Markup

from cairn.service.catalog.queries import RecentStep

_WIDTH: Final = 120
_HEIGHT: Final = 24
_BAR: Final = 3


def sparkline(steps: Sequence[RecentStep]) -> Markup:
    """Draw a bar per recent step: its place is the time of the save, its height the size."""
    points = [(step.created, step.nbytes) for step in steps]
    saved = [(when, size) for when, size in points if when is not None and size is not None]
    if len(saved) < 2:
        return Markup("")
    places = _places([when for when, _ in saved])
    largest = max(size for _, size in saved) or 1
    heights = [max(2, round(_HEIGHT * size / largest)) for _, size in saved]
    # One path for all bars: a page has many of these.
    bars = "".join(
        f"M{place + _BAR / 2:.0f} {_HEIGHT}v-{height}"
        for place, height in zip(places, heights, strict=True)
    )
    return Markup(
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'aria-hidden="true"><path d="{bars}"/></svg>'
    )


def _places(moments: Sequence[datetime]) -> list[float]:
    first, last = moments[0].timestamp(), moments[-1].timestamp()
    span = last - first
    room = _WIDTH - _BAR
    if span <= 0:
        return [room * at / (len(moments) - 1) for at in range(len(moments))]
    return [room * (moment.timestamp() - first) / span for moment in moments]
