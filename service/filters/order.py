"""Parser of list orders in the syntax of AIP-132: `metrics.loss desc, step`.

Source: AIP-132, https://google.aip.dev/132.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cairn.service.filters.expressions import Path
from cairn.service.filters.fields import Field
from cairn.service.filters.text_reader import TextReader

LONGEST_ORDER: Final = 2000
MOST_TERMS: Final = 4


@dataclass(frozen=True)
class Term:
    """Sort key of a list; entries without a value come last.

    Attributes:
        path: Field, or member of a keyed field.
        field: Definition of the field.
        descending: Largest values first.
    """

    path: Path
    field: Field
    descending: bool = False

    def __str__(self) -> str:
        """Return the term in the syntax that `parse_order` reads."""
        return f"{self.path} {'desc' if self.descending else 'asc'}"


def parse_order(text: str, fields: Mapping[str, Field]) -> tuple[Term, ...]:
    """Parse an `order_by` parameter into sort keys, the most significant first.

    Args:
        text: Text from the client; it may be empty.
        fields: Fields of the list's entries.

    Raises:
        InvalidRequestError: The text is no valid order; the error has the position, and what was
            expected there.
    """
    reader = TextReader(
        text, "order_by", kept={name: entry for name, entry in fields.items() if entry.sortable}
    )
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
