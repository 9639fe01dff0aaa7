"""Tables for the shell: drawn for people, tab-separated values for programs.

A pipe gets whole values with the column names in the first line: bytes as a number, moments as
RFC 3339, nothing for what there is not. A terminal gets them as people read them.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cairn.service.sizes import Size

_WIDEST: Final = 10_000

Cell = str | int | Size | datetime | None


def print_table(console: Console, titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Print rows, whole: on a narrow terminal a line goes on in the next one.

    Args:
        console: Where to. A pipe gets rows as they come, a terminal once all are there.
        titles: One per column.
        rows: One cell per column.
    """
    if not console.is_terminal:
        rows = iter(rows)
        first = next(rows, None)  # before the titles: an error leaves standard output empty
        print("\t".join(titles), file=console.file)
        for row in chain(() if first is None else (first,), rows):
            print("\t".join(_plain(cell) for cell in row), file=console.file)
        return
    table = table_of(titles, rows)
    unlimited = console.options.update(max_width=_WIDEST)
    table.width = Measurement.get(console, unlimited, table).maximum
    console.print(table, crop=False)


def table_of(titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> Table:
    """Rows as people read them, as wide as there is room."""
    table = Table(*titles, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*(Text(_readable(cell)) for cell in row))
    return table


def _plain(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, datetime):
        return cell.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return str(int(cell)) if isinstance(cell, int) else _one_cell(cell)


def _readable(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, datetime):
        return f"{cell.astimezone(UTC):%Y-%m-%d %H:%M}"
    return readable(str(cell))


def readable(text: str) -> str:
    """One line that a terminal shows as it is: it would obey to some letters."""
    line = _one_cell(text)
    if line.isprintable():
        return line
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line)


def _one_cell(text: str) -> str:
    """Without what would end the cell or the line."""
    return " ".join(text.split())
