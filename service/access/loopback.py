"""Guard for a server without keys: only this machine may ask, and no page of another site."""

from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from cairn.service.access.callers import Caller, Scope
from cairn.service.access.origins import SAFE_METHODS, host_name
from cairn.service.errors import ForbiddenError
from cairn.service.http.problems import answer
from cairn.service.settings import is_loopback

LOOPBACK: Final = Caller("loopback", Scope.ADMIN)
"""Caller of every request: any client on this machine."""


class LoopbackGuard:
    """ASGI middleware that answers 403 to requests which do not come from this machine.

    It checks three things: the peer's address; the `Host` header, since a hostile page can point
    its own name at 127.0.0.1 (DNS rebinding); and, for changes, the `Origin` header, since a
    browser sends a page's forms to any address.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it with a 403 problem."""
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        refusal = _refusal(scope)
        if refusal is None:
            scope.setdefault("state", {})["caller"] = LOOPBACK
            await self.app(scope, receive, send)
            return
        response = answer(
            ForbiddenError(refusal), method=scope.get("method", ""), path=scope["path"]
        )
        await response(scope, receive, send)


def _refusal(scope: Connection) -> str | None:
    headers = Headers(scope=scope)
    client = scope.get("client")  # None on a Unix socket
    if client is not None and not is_loopback(client[0]):
        return (
            f"The server has no keys and answers this machine only, not {client[0]}. Use an SSH "
            "tunnel or an authenticating proxy on this machine."
        )
    host = headers.get("host", "")
    if not is_loopback(host_name(f"//{host}")[0]):
        return (
            f"Host: without keys the server answers to localhost and loopback addresses only, not "
            f"to {host!r}."
        )
    origin = headers.get("origin")
    changes = scope["type"] == "websocket" or scope["method"] not in SAFE_METHODS
    if origin is not None and changes and host_name(origin)[1] != host.lower():
        return f"Origin: {origin!r} is no page of this server ({host})."
    return None
