"""uvicorn's HTTP protocol with deadlines: idle connections are closed.

Without deadlines, a request that never ends would keep its connection for good (slow loris), and a
few hundred of them would keep all connections of a server.
"""

import asyncio
import time
from typing import Any, ClassVar, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cairn.service.http.problems import MEDIA_TYPE
from cairn.service.schemas import Problem

MAX_HEAD_BYTES: Final = 16 * 1024
"""Largest size of a request line and its headers, together."""


class BoundedConnection(H11Protocol):
    """Connection whose requests have to arrive in time; sending an answer may take longer.

    Attributes:
        head_seconds: Time limit for a request's headers, from the opening of the connection, or
            from the first byte of a later request.
        body_seconds: Time limit for the body, from the end of the headers.
        most: Largest number of connections. For one more, a connection is closed: the one that has
            waited longest for its client to send; else the one whose client has read nothing for
            the longest time, if that is `head_seconds` at least; else the new one.
        idle_since: Time since when this waits for a request, or for the rest of one; None: it does
            not wait.
        stalled_since: Time since when the client has read nothing of its answer; None: it reads.
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
        """Close another connection if there are too many; start the deadline of the first request.

        The new connection itself is closed if no other one can be.
        """
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._make_room():
            self._end()
            return
        self._expect("head", self.head_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the deadline, since the connection is closed."""
        self._expect("", 0)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and set the deadline for what the client has to send next."""
        super().data_received(data)
        self._look()

    def pause_writing(self) -> None:
        """Record that the client does not read its answer."""
        super().pause_writing()
        self.stalled_since = time.monotonic()

    def resume_writing(self) -> None:
        """Record that the client reads its answer again."""
        super().resume_writing()
        self.stalled_since = None

    def on_response_complete(self) -> None:
        """Prepare for the next request, and set its deadline."""
        super().on_response_complete()
        self._look()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that cannot be parsed with a problem, where uvicorn sends plain text."""
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
        """Set the deadline for what the client has to send next.

        The deadline stays as it is while the client sends single bytes.
        """
        client_state = self.conn.their_state
        if client_state is h11.SEND_BODY:
            self._expect("body", self.body_seconds)
        elif client_state is not h11.IDLE:  # the request is complete: the answer may take long
            self._expect("", 0)
        elif self.timeout_keep_alive_task is None:  # the first bytes of a new request have arrived
            self._expect("head", self.head_seconds)
        else:  # between requests: uvicorn's keep-alive timeout applies too
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
        self.transport.abort()  # `close` would wait for a client that reads nothing

    def _make_room(self) -> bool:
        others = [
            connection
            for connection in self.connections
            if isinstance(connection, BoundedConnection)
        ]
        idle = {
            connection: connection.idle_since
            for connection in others
            if connection.idle_since is not None
        }
        latest = time.monotonic() - self.head_seconds
        stalled = {
            connection: connection.stalled_since
            for connection in others
            if connection.stalled_since is not None and connection.stalled_since < latest
        }
        waiting = idle or stalled
        if not waiting:
            return False
        min(waiting, key=lambda connection: waiting[connection])._end()
        return True
