"""Labels and metrics of a step: kept beside its manifest, since they change and it may not."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, ClassVar

from pydantic import Field, field_serializer

from cairn.storage.store import Record

__all__ = ["Annotation"]


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
            TypeError, ValueError: a metric is not a number.
        """
        if not labels and not metrics:
            return None
        return cls(
            labels=dict(labels or {}),
            metrics={name: float(value) for name, value in (metrics or {}).items()},
        )
