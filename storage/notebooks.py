"""Small HTML tables for notebooks, which `_repr_html_` of our objects returns.

All text is escaped, and unprintable characters are spelt out, since users choose the names. The
HTML loads nothing and inherits the notebook's colours, dark or light.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Final, TypeVar

__all__ = ["MAX_ROWS", "html_table", "never_raises", "size_cell"]

MAX_ROWS: Final = 20
_MAX_CELL_LETTERS: Final = 200  # letters of a cell
_CELL: Final = "text-align:left;padding:0.1em 1em 0.1em 0;border:0;background:none;color:inherit"
_TITLE: Final = "font-weight:bold;color:inherit"

Self = TypeVar("Self")


def html_table(
    title: str,
    facts: Iterable[tuple[str, object]] = (),
    columns: Sequence[str] = (),
    rows: Iterable[Sequence[object]] = (),
    *,
    more: int = 0,
) -> str:
    """Return HTML with a title, some facts, and a table.

    Args:
        title: Name of the object.
        facts: Names and values, one per line; a fact whose value is None is left out.
        columns: Names of the columns.
        rows: One cell per column.
        more: Number of further rows that are not shown.
    """
    fact_rows = "".join(
        f'<tr><th style="{_CELL}">{_text(name)}</th><td style="{_CELL}">{_text(value)}</td></tr>'
        for name, value in facts
        if value not in (None, "")
    )
    head = "".join(f'<th style="{_CELL}">{_text(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{_CELL}">{_text(cell)}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    parts = [f'<div style="{_TITLE}">{_text(title)}</div>']
    if fact_rows:
        parts.append(f"<table><tbody>{fact_rows}</tbody></table>")
    if body:
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if more:
        parts.append(f"<div>and {more:,} more</div>")
    return f"<div>{''.join(parts)}</div>"


def never_raises(shown: Callable[[Self], str]) -> Callable[[Self], str]:
    """Return a `_repr_html_` that shows an error as text instead of raising it.

    A notebook would stop at the error.
    """

    @functools.wraps(shown)
    def _repr_html_(self: Self) -> str:
        try:
            return shown(self)
        except Exception as error:  # any: see the docstring
            try:
                text = str(error)
            except Exception:  # a foreign `__str__` may raise
                text = "can't be told"
            return html_table(type(self).__name__, [(type(error).__name__, text)])

    return _repr_html_


def size_cell(nbytes: int | None) -> str | None:
    """Return bytes as text in the largest decimal unit that fits; None for None."""
    if nbytes is None:
        return None
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.95:  # more would round to 1000.0
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _text(value: object) -> str:
    text = "-" if value is None else str(value)
    if len(text) > _MAX_CELL_LETTERS:
        text = f"{text[:_MAX_CELL_LETTERS]}…"
    plain = "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
    return escape(plain, quote=True)
