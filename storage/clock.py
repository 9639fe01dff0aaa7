"""Time as the store keeps it: RFC 3339 in UTC, from a clock that callers pass in."""

from collections.abc import Callable
from datetime import UTC, datetime

__all__ = ["Clock", "from_rfc3339", "rfc3339", "utc_now"]

Clock = Callable[[], datetime]
"""A function that returns the present moment, with a time zone."""


def utc_now() -> datetime:
    """The present moment in UTC."""
    return datetime.now(UTC)


def rfc3339(moment: datetime) -> str:
    """`moment` as text such as "2026-11-21T10:15:30.123456Z".

    Raises:
        ValueError: `moment` has no time zone.
    """
    if moment.tzinfo is None:
        raise ValueError(f"a moment needs a time zone: {moment!r}; use storage.clock.utc_now()")
    return moment.astimezone(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def from_rfc3339(text: str) -> datetime:
    """The moment that `rfc3339` wrote.

    Raises:
        ValueError: `text` is no RFC 3339 moment, or has no time zone.
    """
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"a moment needs a time zone: {text!r}; append Z for UTC")
    return moment
