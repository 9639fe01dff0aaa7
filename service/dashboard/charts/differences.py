"""Entries of several runs or steps beside each other, those that differ first. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

MAX_ROWS: Final = 300
"""Largest number of rows of one table."""

_DEEPEST: Final = 64


@dataclass(frozen=True)
class EntryRow:
    """Entry of several runs or steps.

    Attributes:
        name: Name of the entry.
        values: Its value in each of them; None: there is none.
        differs: Not all values are the same.
        best: Positions of the best values, of a metric whose direction is known.
    """

    name: str
    values: tuple[Any, ...]
    differs: bool
    best: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EntryTable:
    """Table of entries.

    Attributes:
        title: Its title.
        rows: Rows that are shown.
        hidden: Number of equal rows that are not shown, since only differences were asked for.
        cut: Number of further rows that are left out, since there are too many.
    """

    title: str
    rows: list[EntryRow]
    hidden: int
    cut: int


def entry_table(
    title: str,
    sides: Sequence[Mapping[str, Any]],
    *,
    is_equal_shown: bool,
    better: Mapping[str, str] | None = None,
) -> EntryTable:
    """Build a table of entries by name, differing ones first.

    Args:
        title: Title of the table.
        sides: Entries of each run or step.
        is_equal_shown: Show entries that are the same in all of them too.
        better: Directions of metrics, by name.
    """
    rows = [_row(name, sides, better or {}) for name in sorted(set().union(*sides))]
    differing = [row for row in rows if row.differs]
    equal = [row for row in rows if not row.differs]
    shown = [*differing, *equal] if is_equal_shown else differing
    hidden = 0 if is_equal_shown else len(equal)
    return EntryTable(title, shown[:MAX_ROWS], hidden, max(0, len(shown) - MAX_ROWS))


def _row(name: str, sides: Sequence[Mapping[str, Any]], better: Mapping[str, str]) -> EntryRow:
    values = tuple(side.get(name) for side in sides)
    kinds = {(type(value) is bool, _comparable(value)) for value in values}
    differs = len(kinds) > 1
    best: frozenset[int] = frozenset()
    numbers: list[Any] = [value for value in values if _is_number(value)]
    if name in better and differs and len(numbers) > 1:
        extreme = min(numbers) if better[name] == "min" else max(numbers)
        best = frozenset(at for at, value in enumerate(values) if value == extreme)
    return EntryRow(name, values, differs, best)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)


def _comparable(value: Any) -> Any:
    return repr(value) if isinstance(value, list | dict) or value != value else value


MAX_LEAVES: Final = 5000
"""Largest number of leaves of a JSON object that are compared."""


def flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the leaves of a JSON object by path, and a note if there are too many.

    The keys of a path are joined by "/". Empty objects are leaves; lists are leaves too.
    """
    leaves = dict(islice(_leaves(tree, "", _DEEPEST), MAX_LEAVES + 1))
    if len(leaves) <= MAX_LEAVES:
        return leaves, ""
    leaves.popitem()
    return leaves, f"only the first {MAX_LEAVES:,} entries are compared"


def _leaves(tree: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping) and value and depth:
            yield from _leaves(value, f"{prefix}{key}/", depth - 1)
        else:
            yield f"{prefix}{key}", value
