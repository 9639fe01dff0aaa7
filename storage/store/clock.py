"""Times in stored records: RFC 3339 in UTC, from a clock that callers pass."""

import math
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Annotated

from pydantic import AfterValidator

__all__ = ["Clock", "Moment", "from_rfc3339", "is_above_zero", "rfc3339", "utc_now"]

Clock = Callable[[], datetime]
"""Function that returns the current time, with a time zone."""


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)


def rfc3339(moment: datetime) -> str:
    """Return `moment` as text such as "2026-11-21T10:15:30.123456Z".

    Raises:
        ValueError: `moment` has no time zone.
    """
    if moment.tzinfo is None:
        raise ValueError(
            f"a moment needs a time zone: {moment!r}; use cairn.storage.store.clock.utc_now()"
        )
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def from_rfc3339(text: str) -> datetime:
    """Return the time of a text that `rfc3339` returned, in UTC.

    Raises:
        ValueError: `text` is no RFC 3339 moment, or has no time zone.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"a moment needs a time zone: {text!r}; append Z for UTC")
    try:
        return moment.astimezone(UTC)
    except OverflowError as exc:  # in UTC it falls into the year 0
        raise ValueError(f"a moment outside the years 1 to 9999: {text!r}") from exc


def _valid_rfc3339(text: str) -> str:
    from_rfc3339(text)
    return text


Moment = Annotated[str, AfterValidator(_valid_rfc3339)]
"""Field of a stored record: text that `from_rfc3339` parses, stored unchanged."""


def is_above_zero(duration: object) -> bool:
    """Return True for a finite number above 0; a bool is no number here."""
    if isinstance(duration, bool) or not isinstance(duration, int | float):
        return False
    return duration > 0 and math.isfinite(duration)
