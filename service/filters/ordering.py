"""Reads the order of a list, as AIP-132 writes it: `metrics.loss desc, step`.

Source: AIP-132, https://google.aip.dev/132.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cairn.service.filters.expressions import Path
from cairn.service.filters.fields import Field
from cairn.service.filters.texts import Text

LONGEST_ORDER: Final = 2000
MOST_TERMS: Final = 4


@dataclass(frozen=True)
class Term:
    """What a list is in order of; entries without it come last.

    Attributes:
        path: A field, or an entry of one.
        field: What it is.
        descending: Large values, late moments and late letters first.
    """

    path: Path
    field: Field
    descending: bool = False

    def __str__(self) -> str:
        """As `parse_order` reads it."""
        return f"{self.path} {'desc' if self.descending else 'asc'}"


def parse_order(text: str, fields: Mapping[str, Field]) -> tuple[Term, ...]:
    """What a list is in order of, first things first; empty if the text says nothing.

    Args:
        text: As a client sent it.
        fields: That the entries of the list have.

    Raises:
        InvalidRequestError: It is no order; names the place, and what was expected there.
    """
    reader = Text(text, "order_by", kept={k: one for k, one in fields.items() if one.sortable})
    if len(text) > LONGEST_ORDER:
        reader.refuse_all(f"expected {LONGEST_ORDER} characters at most, found {len(text)}")
    if reader.at_end():
        return ()
    terms: list[Term] = []
    while True:
        at = reader.place()
        if len(terms) == MOST_TERMS:
            reader.refuse(f"at most {MOST_TERMS} fields", at=at)
        path, field = reader.path()
        if field.keyed and path.key is None:
            reader.refuse(f"the name of one of them: {path.field}.NAME")
        if any(term.path == path for term in terms):
            reader.refuse(f"a field that is not named twice, as {path} is", at=at)
        terms.append(Term(path, field, descending=reader.take_word("asc", "desc") == "desc"))
        if reader.at_end():
            return tuple(terms)
        if not reader.take(","):
            reader.refuse("asc, desc, a comma or the end")
