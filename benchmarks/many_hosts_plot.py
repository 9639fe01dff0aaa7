"""Draws what was counted over the number of processes, from its JSON alone, as one SVG.

python -m benchmarks.many_hosts_plot results.json plot.svg
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final
from xml.sax.saxutils import escape

PANEL, HEIGHT, LEFT, TOP, BOTTOM, LINE = 400, 260, 56, 64, 40, 15
INK, PALE = "#22262b", "#8a9099"
COLORS: Final = ("#2f7d4f", "#b3452c", "#33628f")
PANELS: Final[dict[str, tuple[str, dict[str, str]]]] = {
    "Requests of one save, of all processes": (
        "requests",
        {"save": "all", "save, but for values": "but for values"},
    ),
    "Requests of one load that are not values, of one process": (
        "requests",
        {
            "load, replicated: metadata, process 0": "process 0",
            "load, replicated: metadata, any other process": "any other",
        },
    ),
    "Bytes read by all processes, of the bytes stored": (
        "ratio",
        {"load, sharded: values": "sharded", "load, replicated: values": "replicated"},
    ),
    "5 TB, simulated: requests but for values": (
        "requests",
        {"simulated save, but for values": "save", "simulated save: objects": "objects"},
    ),
    "5 TB, simulated: seconds": (
        "seconds",
        {
            "simulated save: publish": "publish",
            "simulated a late process is named": "named",
        },
    ),
    "5 TB, simulated: bytes read, of the bytes stored": (
        "ratio",
        {"simulated load, sharded: values": "sharded"},
    ),
}
_COLUMNS: Final = 3

Points = list[tuple[int, float]]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("plot", type=Path)
    arguments = parser.parse_args()
    rows = json.loads(arguments.results.read_text())
    arguments.plot.write_text("\n".join(drawing(rows)) + "\n")
    return 0


def drawing(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The lines of the SVG: a panel for each question, a line for each row."""
    width, height = PANEL * _COLUMNS, HEIGHT * -(-len(PANELS) // _COLUMNS)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">'
    )
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    for number, (title, (field, named)) in enumerate(PANELS.items()):
        found = {
            label: [(row["processes"], row[field]) for row in rows if row["row"] == name]
            for name, label in named.items()
        }
        row, column = divmod(number, _COLUMNS)
        yield f'<g transform="translate(0 {row * HEIGHT})">'
        yield from _panel(column * PANEL, title, {k: v for k, v in found.items() if v})
        yield "</g>"
    yield "</svg>"


def _panel(x: int, title: str, lines: dict[str, Points]) -> Iterator[str]:
    counts = sorted({count for points in lines.values() for count, _ in points})
    if not counts:
        return
    most = 1.25 * max(value for points in lines.values() for _, value in points)
    right, floor = PANEL - 110, HEIGHT - BOTTOM
    span = max(1.0, math.log2(counts[-1] / counts[0]))

    def across(count: int) -> float:
        return x + LEFT + math.log2(count / counts[0]) / span * (right - LEFT)

    def up(value: float) -> float:
        return floor - value / most * (floor - TOP)

    yield _text(x + 12, 24, title, INK)
    yield _line(x + LEFT, floor, x + right, floor)
    for count in counts:
        yield _text(across(count), floor + 18, str(count), PALE, "middle")
    yield _text(x + (LEFT + right) / 2, floor + 34, "processes", PALE, "middle")
    for color, points in zip(COLORS, lines.values(), strict=False):
        path = " ".join(f"{across(count):.1f},{up(value):.1f}" for count, value in points)
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>'
        for count, value in points:
            yield f'<circle cx="{across(count):.1f}" cy="{up(value):.1f}" r="3" fill="{color}"/>'
    ends = {
        label: (*points[-1], color)
        for color, (label, points) in zip(COLORS, lines.items(), strict=False)
    }
    starts = {
        label: (*points[0], color)
        for color, (label, points) in zip(COLORS, lines.items(), strict=False)
    }
    for label, y in _apart({label: up(value) for label, (_, value, _) in ends.items()}):
        count, value, color = ends[label]
        yield _text(across(count) + 8, y + 4, f"{value:g} {label}", color)
    for label, y in _apart({label: up(value) for label, (_, value, _) in starts.items()}):
        count, value, color = starts[label]
        yield _text(across(count) - 8, y + 4, f"{value:g}", color, "end")


def _apart(heights: dict[str, float]) -> Iterator[tuple[str, float]]:
    """The labels with heights at which none covers another, from above."""
    last = -math.inf
    for label, height in sorted(heights.items(), key=lambda one: one[1]):
        last = max(height, last + LINE)
        yield label, last


def _text(x: float, y: float, text: str, color: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
    )


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" stroke="{PALE}"/>'


if __name__ == "__main__":
    sys.exit(main())
