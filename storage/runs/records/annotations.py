"""Labels and metrics of a step: kept beside its manifest, since they change and it may not."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, ClassVar, Final

from pydantic import Field, field_serializer

from cairn.storage.errors import UnsupportedFormatError
from cairn.storage.store import Record, is_text

__all__ = ["Annotation"]

_SHOWN: Final = 200  # characters of a problem


class Annotation(Record):
    """What `annotations/<step>.<n>.json` says; changed by compare-and-swap.

    Attributes:
        labels: for people and filters.
        metrics: numbers by name; NaN and infinities are kept (a diverged loss is worth knowing).
    """

    FORMAT: ClassVar[str] = "cairn.annotation"

    labels: dict[str, str] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)

    @field_serializer("metrics")
    def _as_json(self, metrics: dict[str, float]) -> dict[str, float | str]:
        """JSON has no NaN and no infinities: they go as text, which reads back as a number."""
        return {name: value if isfinite(value) else str(value) for name, value in metrics.items()}

    @classmethod
    def of(
        cls, labels: Mapping[str, str] | None, metrics: Mapping[str, Any] | None
    ) -> "Annotation | None":
        """The annotation to write, or None if there is nothing to say.

        Raises:
            UnsupportedFormatError: labels that are no text by name, or metrics that are no numbers
                by name; all are listed.
        """
        arguments: list[tuple[str, Any]] = [("labels", labels), ("metrics", metrics)]
        problems = [
            f"{name} is {given!r}, expected a mapping or None"[:_SHOWN]
            for name, given in arguments
            if given is not None and not isinstance(given, Mapping)
        ]
        texts: dict[str, str] = {}
        numbers: dict[str, float] = {}
        for name, text in () if problems else (labels or {}).items():
            if is_text(name) and is_text(text):
                texts[name] = text
            else:
                problems.append(f"labels[{name!r}] is {text!r}, expected text"[:_SHOWN])
        for name, value in () if problems else (metrics or {}).items():
            number = _number(value)
            if is_text(name) and number is not None:
                numbers[name] = number
            else:
                problems.append(f"metrics[{name!r}] is {value!r}, expected one number"[:_SHOWN])
        if problems:
            raise UnsupportedFormatError(
                "labels or metrics that can't be kept",
                path="labels, metrics",
                expected='labels such as {"stage": "final"}, metrics such as {"loss": 0.5}',
                found=f"{len(problems)} that are not",
                next_step="Leave these out, or convert them.",
                problems=problems,
            )
        return cls(labels=texts, metrics=numbers) if texts or numbers else None


def _number(given: Any) -> float | None:
    """The number, if it is one: Python's, NumPy's, or an array of JAX without axes."""
    if isinstance(given, str | bytes | bytearray):
        return None
    try:
        return float(given)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
