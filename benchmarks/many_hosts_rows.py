"""A row of the benchmark of many processes."""

from __future__ import annotations

from typing import Any

__all__ = ["row"]


def row(
    name: str,
    processes: int,
    *,
    requests: int | None = None,
    bytes: int | None = None,
    seconds: float | None = None,
    reference: float | None = None,
    ratio: float | None = None,
    budget: float | None = None,
) -> dict[str, Any]:
    """What was counted; None is what the row does not tell."""
    return {
        "row": name,
        "processes": processes,
        "requests": requests,
        "bytes": bytes,
        "seconds": None if seconds is None else round(seconds, 3),
        "reference": reference,
        "ratio": None if ratio is None else round(ratio, 4),
        "budget": budget,
    }
