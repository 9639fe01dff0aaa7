"""Connections end that ask for nothing: uvicorn's HTTP protocol, with the deadlines that it lacks.

A request that never comes to its end would hold its connection for good, and a few hundred of them
all that a server has.
"""

import asyncio
import time
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cairn.service.http.problems import MEDIA_TYPE
from cairn.service.schemas import Problem

MAX_HEAD_BYTES: Final = 16 * 1024
"""Of a request line and its headers, together."""


class BoundedConnection(H11Protocol):
    """A connection whose requests have to arrive in time; who reads an answer may take longer.

    Attributes:
        head_seconds: From the opening of the connection, or the first byte of a later request,
            until its headers are there.
        body_seconds: From then on until its body is.
        most: Connections at a time. One more takes the place of the one that has waited longest
            for its client to ask for something, or else, for `head_seconds` at least, to read on;
            if there is none, it is closed.
        idle_since: Since when a request, or the rest of one, is awaited; None: none is.
        stalled_since: Since when a client has read nothing of its answer; None: it reads.
    """

    head_seconds: ClassVar[float] = 10.0
    body_seconds: ClassVar[float] = 30.0
    most: ClassVar[int] = 1000

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited = ""
        self.idle_since: float | None = None
        self.stalled_since: float | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room, and expect a request."""
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._make_room():
            self._end()
            return
        self._expect("head", self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing any more."""
        self._expect("", 0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read on, and see what is awaited now."""
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self.stalled_since = time.monotonic()

    def resume_writing(self) -> None:
        """Go on, as the client has read."""
        super().resume_writing()
        self.stalled_since = None

    def on_response_complete(self) -> None:
        """Begin with the next request, and see what is awaited now."""
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong with a request that can't be read, as a problem."""
        large = len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES
        status, slug, title = (
            (431, "request-header-fields-too-large", "Request Header Fields Too Large")
            if large
            else (400, "bad-request", "Bad Request")
        )
        detail = f"expected a request line and headers of {MAX_HEAD_BYTES} bytes, found more."
        problem = Problem(
            type=f"urn:cairn:problem:{slug}",
            title=title,
            status=status,
            detail=detail if large else msg,
            instance="",
        )
        body = problem.model_dump_json(exclude_none=True).encode()
        headers = [
            ("content-type", MEDIA_TYPE),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(status_code=status, headers=headers, reason=title.encode()),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look(self) -> None:
        """Set the deadline for what the client has to send next; it moves with no single byte."""
        theirs = self.conn.their_state
        if theirs is h11.SEND_BODY:
            self._expect("body", self.body_seconds)
        elif theirs is not h11.IDLE:  # all is there, and the answer takes its time
            self._expect("", 0)
        elif self.timeout_keep_alive_task is None:  # a new request has begun
            self._expect("head", self.head_seconds)
        else:  # between two requests uvicorn waits, not for long
            self._expect("rest", self.head_seconds)

    def _expect(self, what: str, seconds: float) -> None:
        if what == self._awaited:
            return
        if self._deadline is not None:
            self._deadline.cancel()
        self._awaited = what
        self._deadline = self.loop.call_later(seconds, self._end) if what else None
        self.idle_since = time.monotonic() if what else None

    def _end(self) -> None:
        self._expect("", 0)
        self.transport.abort()  # not `close`: it would wait for a client that reads nothing

    def _make_room(self) -> bool:
        others = [one for one in self.connections if isinstance(one, BoundedConnection)]
        idle = {one: one.idle_since for one in others if one.idle_since is not None}
        latest = time.monotonic() - self.head_seconds
        stalled = {
            one: one.stalled_since
            for one in others
            if one.stalled_since is not None and one.stalled_since < latest
        }
        waiting = idle or stalled
        if not waiting:
            return False
        min(waiting, key=lambda one: waiting[one])._end()
        return True
