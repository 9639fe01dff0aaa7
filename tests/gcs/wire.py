"""One HTTP request and one answer, and the body of a request as a stream of blocks."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedIOBase
from typing import Any, BinaryIO

from tests.gcs.errors import ConnectionLostError, InvalidRequestError

BLOCK_BYTES = 1 << 20
JSON_LIMIT_BYTES = 8 << 20


class Body:
    """The bytes of one request, read once from the connection, never held as a whole.

    Args:
        stream: the connection's reader.
        connection: the socket below it, from which large bodies are read in whole blocks.
        length: Content-Length in bytes; None with chunked transfer encoding.
    """

    def __init__(
        self, stream: BufferedIOBase, connection: socket.socket, length: int | None
    ) -> None:
        self._stream = stream
        self._connection = connection
        self._stream_is_empty = False
        self._remaining = length
        self._chunk_remaining = 0
        self.length = length
        self.received = 0
        self.finished = length == 0
        self.cut_after: int | None = None

    def read(self, limit: int = BLOCK_BYTES) -> bytes:
        """At most `limit` bytes; empty at the end.

        Raises:
            ConnectionLostError: if the peer closed early, or a fault cuts here.
        """
        if self.finished:
            return b""
        if self.cut_after is not None:
            if self.received >= self.cut_after:
                raise ConnectionLostError("cut by a fault")
            limit = min(limit, self.cut_after - self.received)
        block = self._read_chunked(limit) if self._remaining is None else self._read_plain(limit)
        self.received += len(block)
        return block

    def _read_some(self, limit: int) -> bytes:
        block = self._stream.read1(limit)
        if not block:
            raise ConnectionLostError("the peer closed the connection inside a body")
        return block

    def _read_plain(self, limit: int) -> bytes:
        """A whole block: one system call each, however small the packets of the client are."""
        assert self._remaining is not None
        limit = min(limit, self._remaining)
        if self._stream_is_empty:
            block = self._connection.recv(limit, socket.MSG_WAITALL)
            if not block:
                raise ConnectionLostError("the peer closed the connection inside a body")
        else:
            block = self._read_some(limit)
            self._stream_is_empty = limit >= io.DEFAULT_BUFFER_SIZE
        self._remaining -= len(block)
        self.finished = self._remaining == 0
        return block

    def _read_chunked(self, limit: int) -> bytes:
        if self._chunk_remaining == 0:
            size = self._line().split(b";")[0]
            try:
                self._chunk_remaining = int(size, 16)
            except ValueError:
                raise InvalidRequestError(f"bad chunk size {size!r}") from None
            if self._chunk_remaining == 0:
                while self._line():
                    pass
                self.finished = True
                return b""
        block = self._read_some(min(limit, self._chunk_remaining))
        self._chunk_remaining -= len(block)
        if self._chunk_remaining == 0:
            self._line()
        return block

    def _line(self) -> bytes:
        line = self._stream.readline(1024)
        if not line.endswith(b"\n"):
            raise ConnectionLostError("the peer closed the connection inside a chunk header")
        return line.rstrip(b"\r\n")

    def blocks(self) -> Iterator[bytes]:
        """All the rest, block by block."""
        while block := self.read():
            yield block

    def read_all(self, limit: int = JSON_LIMIT_BYTES) -> bytes:
        """The rest as one string, for small bodies.

        Raises:
            InvalidRequestError: if there is more than `limit` bytes.
        """
        parts = []
        size = 0
        for block in self.blocks():
            size += len(block)
            if size > limit:
                raise InvalidRequestError(f"body over {limit} bytes where JSON was expected")
            parts.append(block)
        return b"".join(parts)

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; an empty body is an empty object."""
        data = self.read_all()
        return parse_json(data)

    def drain(self, limit: int) -> bool:
        """Reads and forgets the rest; False if more than `limit` bytes would be left to read."""
        size = 0
        while not self.finished:
            if size > limit or (self._remaining or 0) > limit:
                return False
            size += len(self.read())
        return True


def parse_json(data: bytes) -> dict[str, Any]:
    """A JSON object from bytes; empty bytes are an empty object."""
    if not data.strip():
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        raise InvalidRequestError(f"Parse Error: {error}", reason="parseError") from None
    if not isinstance(value, dict):
        raise InvalidRequestError("Parse Error: a JSON object was expected", reason="parseError")
    return value


@dataclass
class Request:
    """A parsed request, once the route is known.

    Attributes:
        operation: what it does, such as `objects.get`, `media.get` or `upload`.
        bucket: bucket name, "" if the route has none.
        name: object name, "" if the route has none.
        base_url: "http://host:port" as the client sees it.
        metadata: of an upload that begins with one: the object resource in its body.
        media_type: of a multipart upload: the content type of the object's part.
        media_start: of a multipart upload: the object's first bytes, already read.
    """

    method: str
    operation: str
    bucket: str
    name: str
    parameters: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: Body
    base_url: str
    metadata: dict[str, Any] = field(default_factory=dict)
    media_type: str | None = None
    media_start: bytes = b""


@dataclass
class Response:
    """An answer: JSON or plain bytes in `content`, or a region of an open file in `file`."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    file: BinaryIO | None = None
    offset: int = 0
    count: int = 0

    @classmethod
    def json(cls, value: Mapping[str, Any], status: int = 200, **headers: str) -> Response:
        """A JSON answer; underscores in header names become dashes."""
        named = {"Content-Type": "application/json; charset=UTF-8"}
        named.update({name.replace("_", "-"): text for name, text in headers.items()})
        return cls(status=status, headers=named, content=json.dumps(value).encode())

    @property
    def length(self) -> int:
        """Bytes of the body that will be sent."""
        return self.count if self.file is not None else len(self.content)
