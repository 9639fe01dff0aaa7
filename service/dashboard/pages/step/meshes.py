"""A mesh as people type it; pure."""

import re
from typing import Final

from cairn.service.errors import InvalidRequestError

_AXIS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,63})\s*=\s*([1-9][0-9]{0,8})")


def parse_mesh(text: str) -> dict[str, int]:
    """Devices along each axis of `fsdp=4,tp=2`.

    Raises:
        InvalidRequestError: It is another text.
    """
    found: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or match[1] in found:
            detail = (
                f"mesh: expected axes such as fsdp=4,tp=2, each once; found {part.strip()[:60]!r}"
            )
            raise InvalidRequestError(detail, errors=[{"field": "mesh", "detail": detail}])
        found[match[1]] = int(match[2])
    return found
