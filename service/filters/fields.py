"""Fields that lists can be filtered and ordered by, and their kinds."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Final, get_args

from cairn.service.schemas import (
    AuditOutcome,
    Better,
    CheckpointState,
    OperationKind,
    OperationState,
)


class Kind(Enum):
    """Kind of a field's values; the enum's own values are texts for error messages."""

    TEXT = "text"
    CHOICE = "one word of several"
    INTEGER = "a whole number"
    NUMBER = "a number"
    MOMENT = "a time"
    NAMES = "names"
    SCALAR = "a number or a text"

    @property
    def python(self) -> type:
        """Python type of the values of this kind."""
        return _PYTHON.get(self, str)


_PYTHON: Final[Mapping[Kind, type]] = {
    Kind.INTEGER: int,
    Kind.NUMBER: float,
    Kind.MOMENT: datetime,
}


@dataclass(frozen=True)
class Field:
    """Field of a list's entries.

    Attributes:
        kind: Kind of its values.
        keyed: The field has several values, each with a name.
        choices: Allowed words, for `CHOICE`.
    """

    kind: Kind
    keyed: bool = False
    choices: tuple[str, ...] = ()

    @property
    def sorted_as(self) -> tuple[type, ...]:
        """Types of the field's sort keys; entries lack all of them but one.

        Texts by name, such as labels, are sorted by their number if they are one.
        """
        is_number_or_text = self.kind is Kind.SCALAR or (self.kind is Kind.TEXT and self.keyed)
        return (float, str) if is_number_or_text else (self.kind.python,)

    @property
    def sortable(self) -> bool:
        """True if a list can be ordered by this field."""
        return self.kind is not Kind.NAMES


CHECKPOINT_FIELDS: Final[Mapping[str, Field]] = {
    "step": Field(Kind.INTEGER),
    "attempt": Field(Kind.INTEGER),
    "state": Field(Kind.CHOICE, choices=tuple(state.value for state in CheckpointState)),
    "created": Field(Kind.MOMENT),
    "verified": Field(Kind.MOMENT),
    "bytes": Field(Kind.INTEGER),
    "leaves": Field(Kind.INTEGER),
    "model_type": Field(Kind.TEXT),
    "aliases": Field(Kind.NAMES),
    "labels": Field(Kind.TEXT, keyed=True),
    "metrics": Field(Kind.NUMBER, keyed=True),
    "better": Field(Kind.CHOICE, keyed=True, choices=get_args(Better)),
}
METRIC_FIELDS: Final = ("metrics", "best")
"""Fields of runs that have a value for each metric: the last one, and the best one."""

RUN_FIELDS: Final[Mapping[str, Field]] = {
    "root": Field(Kind.TEXT),
    "name": Field(Kind.TEXT),
    "created": Field(Kind.MOMENT),
    "bytes": Field(Kind.INTEGER),
    "latest_step": Field(Kind.INTEGER),
    "checkpoint_count": Field(Kind.INTEGER),
    "aliases": Field(Kind.NAMES),
    "states": Field(Kind.NAMES),
    "labels": Field(Kind.TEXT, keyed=True),
    "config": Field(Kind.SCALAR, keyed=True),
    "metrics": Field(Kind.NUMBER, keyed=True),
    "best": Field(Kind.NUMBER, keyed=True),
}
AUDIT_FIELDS: Final[Mapping[str, Field]] = {
    "at": Field(Kind.MOMENT),
    "caller": Field(Kind.TEXT),
    "action": Field(Kind.TEXT),
    "root": Field(Kind.TEXT),
    "run": Field(Kind.TEXT),
    "outcome": Field(Kind.CHOICE, choices=get_args(AuditOutcome)),
}
OPERATION_FIELDS: Final[Mapping[str, Field]] = {
    "kind": Field(Kind.CHOICE, choices=tuple(kind.value for kind in OperationKind)),
    "state": Field(Kind.CHOICE, choices=tuple(state.value for state in OperationState)),
    "root": Field(Kind.TEXT),
    "run": Field(Kind.TEXT),
    "step": Field(Kind.INTEGER),
    "caller": Field(Kind.TEXT),
    "format": Field(Kind.TEXT),
    "dtype": Field(Kind.TEXT),
    "created": Field(Kind.MOMENT),
    "updated": Field(Kind.MOMENT),
}
