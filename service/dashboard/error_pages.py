"""Errors as HTML pages for browsers. Other clients get the same errors as JSON."""

import json
from typing import Any, Final, cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cairn.service.dashboard.rendering import page
from cairn.service.http.problems import answer

_PROBLEM: Final = "application/problem+json"
_API: Final = "/v1/"
_NO_ROUTE: Final = "urn:cairn:problem:not-found"


class ErrorPages:
    """ASGI middleware that turns problem answers into pages for browsers.

    It wraps the whole app, the guards included, so that browsers get no error as JSON. Paths of the
    API are left alone.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on; if a browser asked for HTML, replace a problem answer by a page."""
        if scope["type"] != "http" or scope["path"].startswith(_API) or not _wants_page(scope):
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def look(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                if Headers(raw=message["headers"]).get("content-type") == _PROBLEM:
                    start = message
                    return
            elif start is not None and message["type"] == "http.response.body":
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await _answer_page(scope, receive, send, start, body)
                return
            await send(message)

        begun = False

        async def begin(message: Message) -> None:
            nonlocal begun
            begun = True
            await look(message)

        try:
            await self.app(scope, receive, begin)
        except Exception as exc:  # no layer above would turn it into a page
            if begun:  # the status is sent already, so no error page can replace the answer
                raise
            response = answer(exc, method=scope["method"], path=scope["path"])
            await response(scope, receive, look)


def _wants_page(scope: Scope) -> bool:
    headers = Headers(scope=scope)
    accepts_page = "text/html" in headers.get("accept", "") or "hx-request" in headers
    # An answer to HEAD has no body that could be read and rendered.
    return accepts_page and scope["method"] != "HEAD"


async def _answer_page(
    scope: Scope, receive: Receive, send: Send, start: Message, body: bytes
) -> None:
    problem = cast(dict[str, Any], json.loads(body))
    if problem["type"] == _NO_ROUTE and "path" not in problem:  # nothing of a store is missing
        problem |= {"title": "Page not found", "detail": "Check the address."}
    part = "hx-request" in Headers(scope=scope)
    template = "parts/problem.html" if part else "error.html"
    scope.setdefault("state", {})
    request = Request(scope)
    told_page = page(request, template, status=start["status"], problem=problem)
    headers = Headers(raw=start["headers"])
    kept = MutableHeaders(raw=told_page.raw_headers)
    # The page has its own content type and length; these headers belong to the status.
    for name in ("retry-after", "allow", "www-authenticate", "x-request-id"):
        if name in headers:
            kept[name] = headers[name]
    await told_page(scope, receive, send)
