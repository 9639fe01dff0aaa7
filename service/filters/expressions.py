"""Parsed filters: conditions, their combinations, and the quoted text in them.

A condition is true or false, and `Not` negates it. If an entry lacks the field, every `Comparison`
is false.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

Operator = Literal["=", "!=", "<", "<=", ">", ">="]
Value = str | int | float | datetime

_PLAIN_NAME: Final = re.compile(r"""[^\s()"'=!<>:.,\\]+""")
_SPECIAL: Final = re.compile(r'["\\]')
_ESCAPED: Final = re.compile(r"""\\(["'\\])""")


@dataclass(frozen=True)
class Path:
    """Field of an entry, or one named member of a keyed field.

    Attributes:
        field: Name of the field.
        key: Name of the member; None: the field itself.
    """

    field: str
    key: str | None = None

    @property
    def text(self) -> str:
        """The path in the filter language, with quotes only if its name needs them."""
        is_plain = self.key is not None and _PLAIN_NAME.fullmatch(self.key)
        return f"{self.field}.{self.key}" if is_plain else str(self)

    def __str__(self) -> str:
        """Return the path in the filter language."""
        return self.field if self.key is None else f"{self.field}.{quote(self.key)}"


@dataclass(frozen=True)
class Comparison:
    """Condition that compares a field's value with a constant."""

    path: Path
    operator: Operator
    value: Value

    def __str__(self) -> str:
        """Return the comparison in the filter language."""
        if isinstance(self.value, str):
            text = quote(self.value)
        elif isinstance(self.value, datetime):
            moment = self.value.astimezone(UTC).isoformat(timespec="microseconds")
            text = quote(moment.replace("+00:00", "Z"))
        else:
            text = repr(self.value)
        return f"{self.path} {self.operator} {text}"


@dataclass(frozen=True)
class Has:
    """Condition that a field has a value.

    Attributes:
        path: Field, or member of a keyed field.
        member: Value that must be among the field's values; in a text field, a part of the text in
            any case. None: any value.
    """

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        """Return the condition in the filter language."""
        return f"{self.path}:{'*' if self.member is None else quote(self.member)}"


@dataclass(frozen=True)
class Not:
    """Negation of an expression."""

    part: "Expression"

    def __str__(self) -> str:
        """Return the negation in the filter language."""
        return f"NOT {_inner(self.part)}"


@dataclass(frozen=True)
class All:
    """Conjunction: all parts are true."""

    parts: "tuple[Expression, ...]"

    def __str__(self) -> str:
        """Return the conjunction in the filter language."""
        return " AND ".join(map(_inner, self.parts))


@dataclass(frozen=True)
class AnyOf:
    """Disjunction: at least one part is true."""

    parts: "tuple[Expression, ...]"

    def __str__(self) -> str:
        """Return the disjunction in the filter language."""
        return " OR ".join(map(_inner, self.parts))


Expression = Comparison | Has | Not | All | AnyOf


def _inner(part: Expression) -> str:
    return f"({part})" if isinstance(part, All | AnyOf) else str(part)


def quote(text: str) -> str:
    """Quote a text for a filter, such as a label's name with dots in it, or a label's value."""
    return '"' + _SPECIAL.sub(r"\\\g<0>", text) + '"'


def unquote(quoted: str) -> str:
    """Return the text between the quotes, without its escapes."""
    return _ESCAPED.sub(r"\1", quoted[1:-1])
