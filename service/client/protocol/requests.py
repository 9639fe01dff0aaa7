"""Parameters of requests, and the headers for preconditions and idempotency."""

from collections.abc import Mapping
from typing import Final

from cairn.service.http.entity_tags import etag

Parameter = str | int | float | bool | None

ANY: Final = {"If-Match": "*"}
"""Header that accepts any current version; used where entries are merged into it."""


def without_none(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Drop the parameters that are None."""
    return {name: value for name, value in parameters.items() if value is not None}


def idempotency(key: str | None) -> dict[str, str]:
    """Return the idempotency header of a request; without a key, no header."""
    return {} if key is None else {"Idempotency-Key": key}


def precondition(expect: int | None) -> dict[str, str]:
    """Return the compare-and-swap header.

    Args:
        expect: Expected sequence number; None: the resource must not exist.
    """
    return {"If-None-Match": "*"} if expect is None else {"If-Match": etag(expect)}
