"""Tables for the shell: aligned columns on a terminal, tab-separated values in a pipe.

A pipe gets exact values below a line of column names: bytes as a number, times as RFC 3339, states
as the API has them, an empty cell for a missing value. A terminal gets rounded sizes, times to the
minute, and states in the words of the page.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Final

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cairn.service.glossary import state_label
from cairn.service.schemas import CheckpointState
from cairn.service.sizes import Size

_WIDEST: Final = 10_000

Cell = str | int | Size | datetime | CheckpointState | None


def print_table(console: Console, titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> None:
    """Print rows without cutting cells: a narrow terminal wraps long lines.

    Args:
        console: Destination. A pipe gets rows as they come, a terminal gets them all at the end.
        titles: Column names.
        rows: Rows with a cell for each column.
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
    """Build a table of readable cells, at most as wide as the terminal."""
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
    if isinstance(cell, CheckpointState):
        return state_label(cell.value)
    return readable(str(cell))


def readable(text: str) -> str:
    """Return one line with control characters escaped: a terminal would act on them."""
    line = _one_cell(text)
    if line.isprintable():
        return line
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in line
    )


def _one_cell(text: str) -> str:
    """Replace tabs and line ends by spaces: they would end the cell or the row."""
    return " ".join(text.split())
