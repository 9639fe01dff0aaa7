"""POST of one request to one address. Only the status of the answer is read.

The standard library's client resolves names by itself, follows redirects, and applies its timeout
to each read. With it, a receiver could redirect to an internal address, or keep a request open for
ever.
"""

import http.client
import io
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import closing
from functools import cache
from typing import Final

from cairn.service.events.targets import Target, resolve
from cairn.service.settings import Networks

CONNECT_SECONDS: Final = 5.0
ANSWER_SECONDS = 15.0
"""Time limit of the whole exchange, up to the end of the answer's headers."""

READ_BYTES: Final = 64 * 1024
"""Largest number of bytes of an answer that are read."""


_SHOWN: Final = 300


class PostFailedError(Exception):
    """No valid answer came in time; the message has the reason."""


def post(target: Target, headers: Mapping[str, str], body: bytes, networks: Networks) -> int:
    """Send a POST request, and return the status of the answer.

    Args:
        target: Address to send to.
        headers: Headers of the request.
        body: Body of the request.
        networks: Private networks that are allowed.

    Raises:
        TargetRefusedError: The target's address is not allowed.
        PostFailedError: No valid answer came in time.
    """
    until = time.monotonic() + ANSWER_SECONDS
    try:
        with closing(_connect(target, networks, until)) as connection:
            connection.sendall(_request(target, headers, body))
            limited = _Limited(connection, until)
            answer = http.client.HTTPResponse(limited, method="POST")  # type: ignore[arg-type]
            answer.begin()
            return answer.status  # nobody reads the body
    except (OSError, UnicodeError, http.client.HTTPException) as exc:
        late = isinstance(exc, TimeoutError)
        why = "it took too long" if late else f"{type(exc).__name__}: {exc}"[:_SHOWN]
        raise PostFailedError(
            f"expected an answer from {target.authority}, found none: {why}"
        ) from exc


def _connect(target: Target, networks: Networks, until: float) -> socket.socket:
    """Connect to the first of the target's addresses that accepts.

    Args:
        target: Address to connect to.
        networks: Private networks that are allowed.
        until: Deadline, on the monotonic clock.

    Raises:
        TargetRefusedError: An address is not allowed.
        OSError: The name does not resolve, or no address accepts in time.
    """
    failure: OSError = OSError("the name means no address")
    for address in resolve(target, networks):
        wait = min(CONNECT_SECONDS, _left(until))
        try:
            plain = socket.create_connection((str(address), target.port), timeout=wait)
        except OSError as exc:
            failure = exc
            continue
        try:
            plain.settimeout(_left(until))
            if target.scheme == "http":
                return plain
            return _context().wrap_socket(plain, server_hostname=target.host)
        except BaseException:
            plain.close()
            raise
    raise failure


@cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()


def _request(target: Target, headers: Mapping[str, str], body: bytes) -> bytes:
    fields = {
        "Host": target.authority,
        "User-Agent": "cairn-webhooks",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Connection": "close",
        **headers,
    }
    lines = (
        f"POST {target.path} HTTP/1.1",
        *(f"{name}: {fields[name]}" for name in fields),
        "",
        "",
    )
    return "\r\n".join(lines).encode("ascii") + body


class _Limited:
    """Connection with a deadline and a size limit, with the one method that `http.client` calls."""

    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Return a file that reads from the connection."""
        return io.BufferedReader(_Reader(self._connection, self._until))


class _Reader(io.RawIOBase):
    def __init__(self, connection: socket.socket, until: float) -> None:
        self._connection = connection
        self._until = until
        self._read = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._read >= READ_BYTES:
            raise OSError(f"expected a head of {READ_BYTES} bytes at most")
        self._connection.settimeout(_left(self._until))
        count = self._connection.recv_into(buffer)
        self._read += count
        return count


def _left(until: float) -> float:
    """Return the seconds until a moment of the monotonic clock.

    Raises:
        TimeoutError: The moment is past.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("too late")
    return left
