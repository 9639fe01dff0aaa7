"""What goes along with a request: its parameters, and the headers that make it safe."""

from collections.abc import Mapping
from typing import Final

from cairn.service.http import etag

Parameter = str | int | float | bool | None

ANY: Final = {"If-Match": "*"}
"""Whatever else is noted there: entries are merged."""


def given(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Those parameters that say something."""
    return {name: value for name, value in parameters.items() if value is not None}


def idempotency(key: str | None) -> dict[str, str]:
    """The header of a request that may be sent again."""
    return {} if key is None else {"Idempotency-Key": key}


def precondition(expect: int | None) -> dict[str, str]:
    """The header of a change to what is still at this sequence number; None: it is not there."""
    return {"If-None-Match": "*"} if expect is None else {"If-Match": etag(expect)}
