"""Tables for the shell: drawn for people, tab-separated values for programs.

A pipe gets whole values with the column names in the first line: bytes as a number, moments as
RFC 3339, nothing for what there is not. A terminal gets them as people read them.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from service.sizes import Size

Cell = str | int | Size | datetime | None


def print_table(
    console: Console,
    titles: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    *,
    names: Sequence[str] = (),
) -> None:
    """Print rows as they come (pipe) or once all are there (terminal).

    Args:
        console: Where to.
        titles: One per column.
        rows: One cell per column.
        names: Titles of the columns that may take several lines on a narrow terminal.
    """
    if not console.is_terminal:
        print("\t".join(titles), file=console.file)
        for row in rows:
            print("\t".join(_plain(cell) for cell in row), file=console.file)
        return
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title not in names)
    for row in rows:
        table.add_row(*(Text(_readable(cell)) for cell in row))
    console.print(table)


def _plain(cell: Cell) -> str:
    if cell is None:
        return ""
    if isinstance(cell, datetime):
        return cell.astimezone(UTC).isoformat().replace("+00:00", "Z")
    text = str(int(cell)) if isinstance(cell, int) else cell
    return text.replace("\t", " ").replace("\n", " ")


def _readable(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, datetime):
        return f"{cell.astimezone(UTC):%Y-%m-%d %H:%M}"
    return str(cell)
