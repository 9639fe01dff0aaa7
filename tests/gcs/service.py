"""What every handler gets: the store and the faults, and small readings of a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.gcs.errors import InvalidRequestError
from tests.gcs.faults import Faults
from tests.gcs.resources import SETTABLE_OBJECT_FIELDS
from tests.gcs.sessions import Sessions
from tests.gcs.store import Store

MAX_NAME_BYTES = 1024


@dataclass
class Service:
    """The double without its HTTP.

    Attributes:
        received_bytes: of the bodies of all requests so far.
    """

    store: Store
    faults: Faults
    sessions: Sessions = field(default_factory=Sessions)
    received_bytes: int = 0


def checked_name(name: object) -> str:
    """An object name that GCS takes.

    Raises:
        InvalidRequestError: if it is missing, too long, or holds a line break.
    """
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("Required parameter: name", reason="required")
    if len(name.encode()) > MAX_NAME_BYTES or "\r" in name or "\n" in name or name in (".", ".."):
        raise InvalidRequestError(f"Invalid object name: {name[:80]!r}")
    return name


def settable(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an object resource that clients may set."""
    return {key: value for key, value in metadata.items() if key in SETTABLE_OBJECT_FIELDS}


def generation(query: Mapping[str, str], name: str = "generation") -> int | None:
    """A generation in a query."""
    text = query.get(name)
    if text is None:
        return None
    if not text.isdecimal():
        raise InvalidRequestError(f"Invalid value for {name}: {text!r}")
    return int(text)
