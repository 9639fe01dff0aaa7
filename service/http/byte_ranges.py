"""Single byte ranges: the `Range` header of RFC 9110. Pure."""

import re
from dataclasses import dataclass

from cairn.service.errors import ProblemError

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class RangeNotSatisfiableError(ProblemError):
    """The range begins after the end of the file; see `cairn.service.errors` for the tree."""

    status, slug, title = 416, "range-not-satisfiable", "Range not satisfiable"


@dataclass(frozen=True)
class ByteRange:
    """Bytes of a file of `size` bytes, from `start` to `stop`; `stop` is not included."""

    start: int
    stop: int
    size: int

    @property
    def content_range(self) -> str:
        """Value of the `Content-Range` header."""
        return f"bytes {self.start}-{self.stop - 1}/{self.size}"

    def __len__(self) -> int:
        return self.stop - self.start


def parse_range(header: str | None, size: int) -> ByteRange | None:
    """Parse a `Range` header; None: send the whole file.

    Anything but a single range of bytes is ignored, as the RFC allows.

    Args:
        header: Value of the header; None: the request has none.
        size: Size of the file in bytes.

    Raises:
        RangeNotSatisfiableError: No byte of the range is in the file.
    """
    match = _RANGE.fullmatch(header.replace(" ", "")) if header else None
    if match is None or match[0] == "bytes=-":
        return None
    first, last = match[1], match[2]
    if first and last and int(last) < int(first):
        return None
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    if start >= stop:
        raise RangeNotSatisfiableError(
            f"Range: expected bytes of a file of {size}, found {header!r}",
            headers={"Content-Range": f"bytes */{size}"},
        )
    return ByteRange(start, stop, size)
