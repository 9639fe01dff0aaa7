"""Parser of sizes such as `5GB`, `512MiB`, or plain bytes."""

import re
from decimal import Decimal
from typing import Final

from cairn.storage.errors import UnsupportedFormatError

__all__ = ["parse_size"]

_SIZE: Final = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,9})?) *(b|[kmgt]i?b)?", re.IGNORECASE)
_UNITS: Final = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40},
}
_LARGEST: Final = 2**63 - 1
"""Largest accepted size in bytes; no file can be larger."""


def parse_size(size: int | str) -> int:
    """Return a size such as "5GB" (decimal, as in Hugging Face's tools) or "512MiB" in bytes.

    Raises:
        UnsupportedFormatError: `size` is no size, below one byte, or more than a file can have.
    """
    count = 0
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif match := _SIZE.fullmatch(str(size).strip()):
        count = int(Decimal(match[1]) * _UNITS[(match[2] or "b").lower()])
    if not 1 <= count <= _LARGEST:
        raise UnsupportedFormatError(
            "not a size",
            path=repr(size),
            expected='a positive number of bytes, such as 5000000000, "5GB" or "512MiB" (kB, MB, '
            "GB, TB; KiB, MiB, GiB, TiB)",
            found=repr(size),
            next_step="Give the size in this form.",
        )
    return count
