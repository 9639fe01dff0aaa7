"""Small charts beside text, as SVG. Sizes are attributes, since the CSP forbids inline styles."""

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from cairn.service.catalog.queries import RecentStep

_WIDTH: Final = 120
_HEIGHT: Final = 24
_BAR: Final = 3


def sparkline(steps: Sequence[RecentStep]) -> Markup:
    """Draw a bar for each recent step: at the time of the save, as high as its size."""
    points = [(step.created, step.nbytes) for step in steps]
    saved = [(when, size) for when, size in points if when is not None and size is not None]
    if len(saved) < 2:
        return Markup("")
    first, last = saved[0][0].timestamp(), saved[-1][0].timestamp()
    room = _WIDTH - _BAR
    if last > first:
        places = [room * (when.timestamp() - first) / (last - first) for when, _ in saved]
    else:
        places = [room * index / (len(saved) - 1) for index in range(len(saved))]
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
