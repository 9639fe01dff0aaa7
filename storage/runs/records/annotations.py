"""Annotation of a step: its labels and metrics.

It is not part of the manifest because it can change, and a manifest never changes.
"""

import reprlib
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, field_serializer

from cairn.counts import count_text
from cairn.storage.errors import UnsupportedFormatError
from cairn.storage.store.bounds import max_entries
from cairn.storage.store.clock import Moment
from cairn.storage.store.records import Record
from cairn.storage.store.uri import is_text

__all__ = [
    "LONGEST_LABEL",
    "LONGEST_NAME",
    "MAX_DAMAGED_LEAVES",
    "MAX_PROBLEM_CHARACTERS",
    "Annotation",
    "Better",
    "Damage",
    "Labels",
]

Better = Literal["min", "max"]
"""Direction of a metric: "min" if lower is better, as for a loss; "max" if higher is better."""

MOST_ENTRIES: Final = 1000
"""Most labels, or metrics, of a step after later changes, since listings read all of them."""

MOST_LABELS: Final = 1000
"""Most labels that are saved with a step or a run."""

MOST_METRICS: Final = 10_000
"""Most metrics that are saved with a step."""

LONGEST_NAME: Final = 256
"""Most characters in the name of a label or metric."""

LONGEST_LABEL: Final = 2000
"""Most characters in the text of a label."""

_SHOWN: Final = 200  # characters of a problem

T = TypeVar("T")


_Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Labels = Annotated[
    dict[_Name, Annotated[str, Field(max_length=LONGEST_LABEL)]], max_entries(MOST_LABELS)
]
_Metrics = Annotated[dict[_Name, float], max_entries(MOST_METRICS)]
_Ways = Annotated[dict[_Name, Better], max_entries(MOST_METRICS)]


MAX_DAMAGED_LEAVES: Final = 100
"""Most leaves, or problems, that a step's damage lists; further ones are only counted."""

MAX_PROBLEM_CHARACTERS: Final = 500
"""Most characters of a leaf's path, or of a problem; the rest is cut off."""

_SHOWN_LEAVES: Final = 5


class Damage(BaseModel):
    """Damage that the last verification of a step found.

    Attributes:
        at: time of the verification, RFC 3339 in UTC.
        by: name of who verified the step.
        job: id of the operation that verified it, or "".
        leaves: "item: path" of leaves that can't be read as they were saved, the first 100.
        leaf_count: number of all such leaves.
        problems: everything that is not as it was saved, one line each, the first 100.
        problem_count: number of all problems.
        loads: True if Cairn still loads every value as it was saved.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    at: Moment
    by: str = ""
    job: str = ""
    leaves: tuple[Annotated[str, Field(max_length=MAX_PROBLEM_CHARACTERS)], ...] = Field(
        default=(), max_length=MAX_DAMAGED_LEAVES
    )
    leaf_count: int = 0
    problems: tuple[Annotated[str, Field(max_length=MAX_PROBLEM_CHARACTERS)], ...] = Field(
        default=(), max_length=MAX_DAMAGED_LEAVES
    )
    problem_count: int = 0
    loads: bool = False

    def text(self) -> str:
        """Return one line: the time, who verified the step, and the damaged leaves."""
        job = f", operation {self.job}" * bool(self.job)
        noted = f"damage noted {self.at} by {self.by or 'somebody'}{job}"
        if not self.leaf_count:
            loads = ", though every value loads as it was saved" * self.loads
            return f"{noted}: {count_text(self.problem_count, 'problem')}{loads}"
        named = ", ".join(self.leaves[:_SHOWN_LEAVES])
        more = f" and {self.leaf_count - _SHOWN_LEAVES} more"
        more *= self.leaf_count > _SHOWN_LEAVES
        return f"{noted}: {count_text(self.leaf_count, 'leaf')} can't be read: {named}{more}"


class Annotation(Record):
    """Content of `annotations/<step>.<n>.json`; changed by compare-and-swap.

    Attributes:
        labels: texts by name, for people and filters.
        metrics: numbers by name; NaN and infinities are allowed, as a loss may diverge.
        better: direction of metrics, by the metric's name; metrics without a direction are absent.
        verified: when a verification last found every byte of the step as it was saved; None if
            there was no verification, or the last one found damage.
        damaged: the damage that the last verification found; None if there is none.
    """

    FORMAT: ClassVar[str] = "cairn.annotation"

    labels: Labels = Field(default_factory=dict)
    metrics: _Metrics = Field(default_factory=dict)
    better: _Ways = Field(default_factory=dict, exclude_if=lambda field: not field)
    verified: Moment | None = Field(default=None, exclude_if=lambda field: field is None)
    damaged: Damage | None = Field(default=None, exclude_if=lambda field: field is None)

    @field_serializer("metrics")
    def _as_json(self, metrics: dict[str, float]) -> dict[str, float | str]:
        """Return metrics with NaN and infinities as text, since JSON has no numbers for them."""
        return {name: value if isfinite(value) else str(value) for name, value in metrics.items()}

    def entries(self) -> dict[str, Any]:
        """Return labels, metrics and directions as JSON; empty ones are included."""
        kept = {"labels", "metrics", "better"}
        return {"better": {}, **self.model_dump(mode="json", include=kept)}

    @classmethod
    def of(
        cls,
        labels: Mapping[str, str] | None,
        metrics: Mapping[str, Any] | None,
        better: Mapping[str, Better] | None = None,
    ) -> "Annotation | None":
        """Return an annotation with these entries; None if there are no entries.

        Raises:
            UnsupportedFormatError: a label is not text, a metric is not a number, a name is too
                long, or a direction has no metric; all such entries are listed.
        """
        annotation = cls()._with(labels, metrics, better, removed=False)
        return annotation if annotation != cls() else None

    def changed(
        self,
        labels: Mapping[str, str | None] | None = None,
        metrics: Mapping[str, Any] | None = None,
        better: Mapping[str, Better | None] | None = None,
    ) -> "Annotation":
        """Return a copy with these entries set; an entry whose value is None is removed.

        Args:
            labels: texts by name.
            metrics: numbers by name; the direction of a removed metric is removed too.
            better: direction of metrics, which must exist after the change.

        Raises:
            UnsupportedFormatError: some entries can't be stored; all of these are listed.
        """
        return self._with(labels, metrics, better, removed=True)

    def _with(
        self,
        labels: Mapping[str, str | None] | None,
        metrics: Mapping[str, Any] | None,
        better: Mapping[str, Better | None] | None,
        *,
        removed: bool,
    ) -> "Annotation":
        entries = _Entries(removed)
        text = f"text of at most {LONGEST_LABEL} characters"
        texts = entries.merged("labels", self.labels, labels, _text, text)
        numbers = entries.merged("metrics", self.metrics, metrics, _number, "one number")
        directions = {name: way for name, way in self.better.items() if name in numbers}
        ways = entries.merged("better", directions, better, _way, "'min' or 'max'")
        if not entries.problems:
            entries.problems += [
                f"better[{name!r}] is {way!r}, expected a metric of that name"[:_SHOWN]
                for name, way in ways.items()
                if name not in numbers
            ]
        if entries.problems:
            raise UnsupportedFormatError(
                "labels or metrics that can't be kept",
                path="labels, metrics",
                expected='labels such as {"stage": "final"}, metrics such as {"loss": 0.5}, and '
                'of metrics what is better, such as {"loss": "min"}',
                found=f"{len(entries.problems)} that are not",
                next_step="Leave these out, or convert them.",
                problems=entries.problems,
            )
        return self.model_copy(update={"labels": texts, "metrics": numbers, "better": ways})


class _Entries:
    """Merger of new entries into present ones; it collects a problem for each invalid entry."""

    def __init__(self, removed: bool) -> None:
        """Create it without problems; `removed`: whether a value of None removes an entry."""
        self.problems: list[str] = []
        self._removed = removed

    def merged(
        self,
        what: str,
        entries: Mapping[str, T],
        changes: object,
        read: Callable[[Any], T | None],
        expected: str,
    ) -> dict[str, T]:
        """Return the present entries with the changes applied.

        Args:
            what: name of this kind of entry, for errors.
            entries: the present entries.
            changes: the entries to set.
            read: returns the value to store, or None if the value is invalid.
            expected: description of valid values, for errors.
        """
        merged = dict(entries)
        if changes is None:
            return merged
        if not isinstance(changes, Mapping):
            self.problems.append(f"{what} is {changes!r}, expected a mapping or None"[:_SHOWN])
            return merged
        for name, value in changes.items():
            entry = read(value)
            is_name = is_text(name) and len(name) <= LONGEST_NAME
            if is_name and entry is not None:
                merged[name] = entry
            elif is_name and value is None and self._removed:
                merged.pop(name, None)
            else:
                shown = f"{what}[{reprlib.repr(name)}] is {reprlib.repr(value)}"
                longest = f", and a name of at most {LONGEST_NAME} characters" * (not is_name)
                self.problems.append(f"{shown}, expected {expected}{longest}")
        most = MOST_LABELS if what == "labels" else MOST_METRICS
        if len(merged) > most:
            self.problems.append(f"{what} would be {len(merged)} entries, expected {most} at most")
        elif self._removed and len(merged) > max(MOST_ENTRIES, len(entries)):
            self.problems.append(
                f"{what} would be {len(merged)} entries, expected {MOST_ENTRIES} at most"
            )
        return merged


def _text(label: Any) -> str | None:
    return label if is_text(label) and len(label) <= LONGEST_LABEL else None


def _way(direction: Any) -> Better | None:
    return (
        cast(Better, direction)
        if isinstance(direction, str) and direction in get_args(Better)
        else None
    )


def _number(metric: Any) -> float | None:
    """Return a number of Python or NumPy, or a JAX array without axes, as a float; else None."""
    if isinstance(metric, str | bytes | bytearray):
        return None
    try:
        return float(metric)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
