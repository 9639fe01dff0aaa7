"""The `multipart/related` body of an upload: a JSON part, then the bytes, streamed."""

from __future__ import annotations

import re
from collections.abc import Callable
from email.message import Message
from email.parser import BytesHeaderParser
from typing import Any

from tests.gcs.errors import InvalidRequestError
from tests.gcs.wire import Body, parse_json

HEAD_LIMIT_BYTES = 8 << 20
HEADERS_END = re.compile(rb"\r?\n\r?\n")


def boundary_of(content_type: str) -> bytes:
    """The boundary in a Content-Type header.

    Raises:
        InvalidRequestError: if there is none.
    """
    message = Message()
    message["Content-Type"] = content_type
    boundary = message.get_boundary()
    if not boundary:
        raise InvalidRequestError(f"no multipart boundary in Content-Type {content_type!r}")
    return boundary.encode()


def read_head(body: Body, boundary: bytes) -> tuple[dict[str, Any], str | None, bytes]:
    """Reads up to where the bytes begin.

    Returns:
        The JSON part, the content type of the second part, and the first of its bytes, which
        were read too far.
    """
    marker = re.escape(b"--" + boundary)
    pattern = re.compile(
        rb"\A(?:\r?\n)*" + marker + rb"[ \t]*\r?\n(?P<first>.*?)\r?\n"
        + marker + rb"[ \t]*\r?\n(?P<second>.*?\r?\n)??\r?\n",
        re.DOTALL,
    )  # fmt: skip
    data = b""
    while not (match := pattern.match(data)):
        block = body.read()
        if not block:
            raise InvalidRequestError("multipart body ends before its second part")
        data += block
        if len(data) > HEAD_LIMIT_BYTES:
            raise InvalidRequestError("multipart body without a second part")
    first = match["first"]
    split = HEADERS_END.search(first)
    metadata = parse_json(first[split.end() :] if split else first)
    headers = BytesHeaderParser().parsebytes(match["second"] or b"")
    return metadata, headers.get("Content-Type"), data[match.end() :]


def copy_media(body: Body, boundary: bytes, first: bytes, write: Callable[[bytes], None]) -> None:
    """Hands on the bytes of the second part; the closing boundary is held back and dropped.

    Raises:
        InvalidRequestError: if the closing boundary is missing.
    """
    closing = re.compile(rb"\r?\n--" + re.escape(boundary) + rb"--\s*\Z")
    hold = len(boundary) + 64
    tail = first
    while block := body.read():
        if len(tail) > hold:
            write(tail[:-hold])
            tail = tail[-hold:]
        if len(block) > hold:
            write(tail)
            write(block[:-hold])
            tail = block[-hold:]
        else:
            tail += block
    match = closing.search(tail)
    if not match:
        raise InvalidRequestError("multipart body ends without its closing boundary")
    write(tail[: match.start()])
