"""Query of a list: filter and order."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

from cairn.service.filters.expressions import (
    All,
    AnyOf,
    Comparison,
    Expression,
    Has,
    Not,
    Path,
    Value,
)
from cairn.service.filters.fields import Field
from cairn.service.filters.order import Term, parse_order
from cairn.service.filters.parser import parse_filter


@dataclass(frozen=True)
class Search:
    """Filter and order of a list.

    Attributes:
        filter: Condition on entries; None: all entries.
        order: Sort keys, the most significant first; equal entries are sorted in the list's own
            order.
    """

    filter: Expression | None = None
    order: tuple[Term, ...] = ()

    @classmethod
    def parse(cls, filter: str, order_by: str, fields: Mapping[str, Field]) -> Self:
        """Parse both parameters.

        Args:
            filter: Text from the client; empty: all entries.
            order_by: Text from the client; empty: the list's own order.
            fields: Fields of the list's entries.

        Raises:
            InvalidRequestError: One of the texts is invalid.
        """
        return cls(parse_filter(filter, fields), parse_order(order_by, fields))

    def among(self, expression: Expression) -> Self:
        """Return this search with one more condition on entries."""
        both = expression if self.filter is None else All((self.filter, expression))
        return replace(self, filter=both)

    def equal(self, **values: Value) -> Self:
        """Return this search among the entries whose fields have these values."""
        parts = tuple(Comparison(Path(field), "=", value) for field, value in values.items())
        return self.among(All(parts))

    def __bool__(self) -> bool:
        """Return whether there is a filter or an order."""
        return self.filter is not None or bool(self.order)

    def names(self, field: str) -> bool:
        """Return whether the filter uses a field."""
        return self.filter is not None and _names(self.filter, field)

    @property
    def mark(self) -> str:
        """Digest of the search, which page tokens include; empty for an empty search."""
        if not self:
            return ""
        text = f"{self.filter}\n{', '.join(map(str, self.order))}"
        return f", {hashlib.sha256(text.encode()).hexdigest()[:32]}"

    def key_kinds(self, last: Mapping[str, type]) -> list[type | tuple[type, ...]]:
        """Return the possible types of each part of a sort key in the order of this search.

        Args:
            last: Types of the list's own sort keys, by field.
        """
        named = {term.path.field for term in self.order}
        kinds = [(python, type(None)) for term in self.order for python in term.field.sorted_as]
        return [*kinds, *(kind for name, kind in last.items() if name not in named)]


EVERYTHING: Final = Search()
"""Search without a filter, in the list's own order."""


def _names(expression: Expression, field: str) -> bool:
    match expression:
        case Comparison(path=path) | Has(path=path):
            return path.field == field
        case Not(part=part):
            return _names(part, field)
        case All(parts=parts) | AnyOf(parts=parts):
            return any(_names(part, field) for part in parts)
