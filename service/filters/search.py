"""What is asked of a list: which entries, in what order."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from cairn.service.filters.expressions import All, AnyOf, Comparison, Expression, Has, Not
from cairn.service.filters.fields import Field
from cairn.service.filters.ordering import Term, parse_order
from cairn.service.filters.parsing import parse_filter


@dataclass(frozen=True)
class Search:
    """Entries that a filter lets through, in an order.

    Attributes:
        filter: None: all entries.
        order: First things first; what is equal in all of them comes in the list's own order.
    """

    filter: Expression | None = None
    order: tuple[Term, ...] = ()

    @classmethod
    def parse(cls, filter: str, order_by: str, fields: Mapping[str, Field]) -> Self:
        """Read both.

        Args:
            filter: As a client sent it; empty: all entries.
            order_by: The same; empty: in the list's own order.
            fields: That the entries of the list have.

        Raises:
            InvalidRequestError: One of them is none.
        """
        return cls(parse_filter(filter, fields), parse_order(order_by, fields))

    def __bool__(self) -> bool:
        """Whether anything is asked."""
        return self.filter is not None or bool(self.order)

    def names(self, field: str) -> bool:
        """Whether the filter asks about a field."""
        return self.filter is not None and _names(self.filter, field)

    @property
    def mark(self) -> str:
        """For page tokens: another for what means something else; empty if nothing is asked."""
        if not self:
            return ""
        asked = f"{self.filter}\n{', '.join(map(str, self.order))}"
        return f", {hashlib.sha256(asked.encode()).hexdigest()[:32]}"

    def key_kinds(self, last: Mapping[str, type]) -> list[type | tuple[type, ...]]:
        """Of each part of an entry's key in this order, the types that it can have.

        Args:
            last: By field, those of the list's own order.
        """
        named = {term.path.field for term in self.order}
        asked = [(term.field.kind.python, type(None)) for term in self.order]
        return [*asked, *(kind for name, kind in last.items() if name not in named)]


def _names(expression: Expression, field: str) -> bool:
    match expression:
        case Comparison(path=path) | Has(path=path):
            return path.field == field
        case Not(part=part):
            return _names(part, field)
        case All(parts=parts) | AnyOf(parts=parts):
            return any(_names(part, field) for part in parts)
