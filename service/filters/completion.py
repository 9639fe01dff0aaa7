"""Completion of a field that is being typed in a filter, an order or a list of columns. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Self

from cairn.service.filters.expressions import unquote

_STRING: Final = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'""")
_PARTIAL: Final = re.compile(
    r"""(?P<field>[A-Za-z_]*)(?:\.(?P<key>"(?:[^"\\]|\\.)*|[^\s()"'=!<>:.,\\]*))?$"""
)
_BEFORE: Final = frozenset(" \t\n(,")
"""Characters after which a field can begin."""


@dataclass(frozen=True)
class Completion:
    """Completions of the unfinished field at the end of a text.

    Attributes:
        start: Position in the text from which an option stands in its place.
        options: Texts that may stand there.
    """

    start: int
    options: list[str]


@dataclass(frozen=True)
class PartialPath:
    """Unfinished field at the end of a text.

    Attributes:
        start: Position where it begins.
        field: Name of the field, as far as it was typed.
        key: Name of the member, as far as it was typed, without quotes; None: no dot was typed.
    """

    start: int
    field: str
    key: str | None

    @classmethod
    def at_end(cls, text: str) -> Self | None:
        """Return the field that the text ends in; None: it ends in something else."""
        # A finished text can't contain the start of a field; it is blanked out, but for its length.
        blank = _STRING.sub(lambda string: "." * len(string[0]), text)
        partial = _PARTIAL.search(blank)
        if partial is None or (partial.start() and blank[partial.start() - 1] not in _BEFORE):
            return None
        key = partial["key"]
        if key is not None and key.startswith('"'):
            key = unquote(f'{key}"')
        if not {'"', "'"}.isdisjoint(blank[: partial.start()]):  # in a text that is not closed
            return None
        before = blank[: partial.start()].split()
        if before and re.fullmatch(r"[=!<>:]+", before[-1]):  # a value is being typed
            return None
        return cls(partial.start(), partial["field"], key)

    def matching(self, fields: Iterable[str]) -> list[str]:
        """Return the fields that begin with what was typed."""
        return [field for field in fields if field.startswith(self.field.lower())]
