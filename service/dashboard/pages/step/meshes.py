"""Parser of a mesh as people type it."""

import re
from typing import Final

from cairn.service.errors import InvalidRequestError

_AXIS: Final = re.compile(r"([A-Za-z_][A-Za-z0-9_]{0,63})\s*=\s*([1-9][0-9]{0,8})")


def parse_mesh(text: str) -> dict[str, int]:
    """Parse a mesh such as `fsdp=4,tp=2` into the number of devices along each axis.

    Raises:
        InvalidRequestError: The text is not a mesh, or names an axis twice.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or match[1] in sizes:
            detail = (
                f"mesh: expected axes such as fsdp=4,tp=2, each once; found {part.strip()[:60]!r}"
            )
            raise InvalidRequestError(detail, errors=[{"field": "mesh", "detail": detail}])
        sizes[match[1]] = int(match[2])
    return sizes
