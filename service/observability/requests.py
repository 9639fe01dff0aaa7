"""Observation of every request: id, log line, metrics and span."""

import logging
import time
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.service.observability.ids import REQUEST_ID_HEADER, begin_request
from cairn.service.observability.metrics import RequestMetrics
from cairn.service.observability.tracing import span

logger = logging.getLogger("cairn.access")

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
NO_ROUTE: Final = "(none)"
"""Route label of requests that match no route, or are refused before routing."""

CLIENT_GONE: Final = 499
"""Status label of requests whose client closed the connection before the answer."""


class ObservedRequests:
    """Outermost ASGI middleware of the application.

    Args:
        app: Application that answers.
        metrics: Metrics of the requests.
        route_of: Returns the template of the route that answered a request.
    """

    def __init__(
        self, app: ASGIApp, *, metrics: RequestMetrics, route_of: Callable[[Scope], str | None]
    ) -> None:
        self.app = app
        self._metrics = metrics
        self._route_of = route_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and record it once it was answered."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        identity = begin_request(headers.get(REQUEST_ID_HEADER))
        answer = _Answer(send, identity, self._metrics)
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        with (
            self._metrics.in_progress.track_inprogress(),
            span(method, kind="server", carrier=headers) as current_span,
        ):
            try:
                await self.app(scope, receive, answer)
            except Exception:
                answer.status = answer.status or 500  # Starlette sends the 500 after this
                raise
            finally:
                answer.end()
                route = self._route_of(scope) or NO_ROUTE
                status = answer.status or CLIENT_GONE
                self._metrics.answered(
                    method=method, route=route, status=status, seconds=answer.seconds
                )
                current_span.name(f"{method} {route}")
                current_span.note("http.request.method", method)
                current_span.note("http.route", route)
                current_span.note("http.response.status_code", status)
                current_span.note("cairn.request_id", identity)
                current_span.fail(status >= 500)
                logger.info(
                    "request",
                    extra={
                        "method": method,
                        "route": route,
                        "status": status,
                        "seconds": round(answer.seconds, 6),
                        "actor": getattr(scope.get("state", {}).get("caller"), "name", None),
                    },
                )


class _Answer:
    """ASGI `send` of a request; it records status and time, and adds the request's id header."""

    def __init__(self, send: Send, identity: str, metrics: RequestMetrics) -> None:
        self.status: int | None = None
        self._send = send
        self._identity = identity
        self._metrics = metrics
        self._began = time.monotonic()
        self._streams = False
        self._seconds: float | None = None

    @property
    def seconds(self) -> float:
        """Seconds until the answer was sent or, for an event stream, until it began."""
        return time.monotonic() - self._began if self._seconds is None else self._seconds

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers[REQUEST_ID_HEADER] = self._identity
            if headers.get("content-type", "").startswith("text/event-stream"):
                self._streams = True
                self._seconds = self.seconds
                self._metrics.event_streams.inc()
        await self._send(message)

    def end(self) -> None:
        if self._streams:
            self._metrics.event_streams.dec()
