"""What a filter means, once it is read: conditions, and how they are joined.

A condition holds or does not; `Not` is its opposite. None but `Has` holds of what there is not.
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from cairn.service.filters.quoting import quote

Operator = Literal["=", "!=", "<", "<=", ">", ">="]
Value = str | int | float | datetime


@dataclass(frozen=True)
class Path:
    """A field, or one entry of a field that has several by name.

    Attributes:
        field: Its name.
        key: The entry's; None: the field itself.
    """

    field: str
    key: str | None = None

    def __str__(self) -> str:
        """As a filter has it."""
        return self.field if self.key is None else f"{self.field}.{quote(self.key)}"


@dataclass(frozen=True)
class Comparison:
    """A field has a value that compares so."""

    path: Path
    operator: Operator
    value: Value

    def __str__(self) -> str:
        """As a filter has it."""
        return f"{self.path} {self.operator} {_written(self.value)}"


@dataclass(frozen=True)
class Has:
    """A field has a value; one that has several has `member` among them, or any for None.

    Text has `member` within it, in capitals or not.
    """

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        """As a filter has it."""
        return f"{self.path}:{'*' if self.member is None else quote(self.member)}"


@dataclass(frozen=True)
class Not:
    """The opposite."""

    part: "Expression"

    def __str__(self) -> str:
        """As a filter has it."""
        return f"NOT {_inner(self.part)}"


@dataclass(frozen=True)
class All:
    """Each of several."""

    parts: "tuple[Expression, ...]"

    def __str__(self) -> str:
        """As a filter has it."""
        return " AND ".join(map(_inner, self.parts))


@dataclass(frozen=True)
class AnyOf:
    """At least one of several."""

    parts: "tuple[Expression, ...]"

    def __str__(self) -> str:
        """As a filter has it."""
        return " OR ".join(map(_inner, self.parts))


Expression = Comparison | Has | Not | All | AnyOf


def _inner(part: Expression) -> str:
    return f"({part})" if isinstance(part, All | AnyOf) else str(part)


def _written(value: Value) -> str:
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, datetime):
        moment = value.astimezone(UTC).isoformat(timespec="microseconds")
        return quote(moment.replace("+00:00", "Z"))
    return repr(value)
