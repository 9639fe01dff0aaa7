"""Draws the rows of the storage benchmark, from their JSON alone, as one SVG.

A bar is a ratio to the row's reference; the line at 1 is the reference, the tick is the budget.

    python -m benchmarks.storage_plot results.json plot.svg
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from benchmarks.storage_rows import is_peers

WIDTH, LEFT, RIGHT = 1290, 440, 400
LINE, GAP, TOP = 20, 14, 56
MOST = 3.0
"""Ratios above this are cut off; their number is written beside the bar."""
WITHIN, OVER, PEER, INK, PALE = "#2f7d4f", "#b3452c", "#b9bec6", "#22262b", "#646b73"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("plot", type=Path)
    arguments = parser.parse_args()
    plot(arguments.results, arguments.plot)
    return 0


def plot(results: Path, target: Path, *, is_peer: Callable[[str], bool] = is_peers) -> None:
    """Reads the rows from `results` and writes the plot; ours come first in their group."""
    rows: list[dict[str, Any]] = json.loads(results.read_text())
    target.write_text("\n".join(drawing(rows, is_peer)) + "\n")


def drawing(rows: list[dict[str, Any]], is_peer: Callable[[str], bool]) -> Iterator[str]:
    """The lines of the SVG."""
    gaps = sum(not is_peer(row["row"]) for row in rows)
    height = TOP + LINE * len(rows) + GAP * gaps + GAP
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield _text(12, 22, "Ratio to the reference of the same round; lower is better", INK, size=14)
    yield _text(12, 40, "line: the reference (1.0) · tick: the budget · pale: peers", PALE)
    yield _line(_across(1.0), TOP - 8, _across(1.0), height - GAP, PALE, "1")
    y = TOP
    for row in rows:
        own = not is_peer(row["row"])
        y += GAP if own else 0
        yield from _bar(row, y, own)
        y += LINE
    yield "</svg>"


def _bar(row: dict[str, Any], y: int, own: bool) -> Iterator[str]:
    ratio, budget = row["ratio"], row["budget"]
    over = budget is not None and ratio > budget
    color = PEER if not own else OVER if over else WITHIN
    end = _across(ratio)
    yield _text(LEFT - 8, y + 13, row["row"], INK if own else PALE, anchor="end")
    yield f'<rect x="{LEFT}" y="{y + 3}" width="{end - LEFT:.1f}" height="13" fill="{color}"/>'
    note = f"{ratio:.2f}{' →' if ratio > MOST else ''}"
    if budget is not None:
        yield _line(_across(budget), y, _across(budget), y + 19, INK, "2")
    yield _text(end + 6, y + 13, note, INK if own else PALE)
    if own:
        yield _text(WIDTH - RIGHT + 70, y + 13, f"of {row['reference']['name']}", PALE)


def _across(ratio: float) -> float:
    return LEFT + min(ratio, MOST) / MOST * (WIDTH - LEFT - RIGHT)


def _text(
    x: float, y: float, text: str, color: str, *, anchor: str = "start", size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{color}" text-anchor="{anchor}" '
        f'font-size="{size}" stroke="white" stroke-width="3" paint-order="stroke">'
        f"{escape(text)}</text>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: str) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}" stroke="{color}" '
        f'stroke-width="{width}"/>'
    )


if __name__ == "__main__":
    sys.exit(main())
