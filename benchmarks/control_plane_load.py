"""Clients of an HTTP server: as many connections as asked for, each with its next request at once.

The client is as small as it can be, since it shares the machine's cores with the server: requests
are made beforehand, and of an answer only the status and the length are read. It is the same for
every server that is measured.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

Requests = Callable[[int, int], bytes]
"""The request of a client (its number, from 0) in its n-th turn."""


@dataclass(frozen=True)
class Load:
    """What came of a load; times in seconds."""

    seconds: Sequence[float]
    wall: float

    @property
    def p50(self) -> float:
        """Seconds that half of the requests took at most."""
        return statistics.median(self.seconds)

    @property
    def p99(self) -> float:
        """Seconds that 99 % of the requests took at most."""
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]

    @property
    def per_second(self) -> float:
        """Answers of all clients together."""
        return len(self.seconds) / self.wall


def request(
    url: str, method: str, path: str, body: bytes = b"", headers: Iterable[str] = ()
) -> bytes:
    """A request as it goes over the wire."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {urlsplit(url).netloc}", *headers]
    if body:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


def load(url: str, requests: Requests, *, clients: int, turns: int) -> Load:
    """Have every client make its requests, one after the other.

    Raises:
        RuntimeError: An answer was no success.
    """
    return asyncio.run(_load(url, requests, clients, turns))


async def _load(url: str, requests: Requests, clients: int, turns: int) -> Load:
    address = urlsplit(url)
    assert address.hostname
    opened = [
        await asyncio.open_connection(address.hostname, address.port, limit=1 << 22)
        for _ in range(clients)
    ]
    seconds: list[float] = []

    async def ask(number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for turn in range(turns):
            sent = requests(number, turn)
            began = time.perf_counter()
            writer.write(sent)
            await _answer(reader)
            seconds.append(time.perf_counter() - began)

    began = time.perf_counter()
    try:
        await asyncio.gather(*(ask(number, *pair) for number, pair in enumerate(opened)))
    finally:
        for _, writer in opened:
            writer.close()
    return Load(seconds, time.perf_counter() - began)


async def _answer(reader: asyncio.StreamReader) -> bytes:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = head.split("\r\n")
    fields = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in fields}
    body = b""
    if headers.get("transfer-encoding") == "chunked":
        while size := int(await reader.readuntil(b"\r\n"), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    if not status.split(" ")[1].startswith("2"):
        raise RuntimeError(f"expected a success, found {status}: {body[:500].decode()}")
    return body
