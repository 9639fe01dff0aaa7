"""Session cookie: sent by https only, except to a browser on the server's own machine."""

from typing import Final

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import Scope as Connection

from cairn.service.access.origins import is_local
from cairn.service.access.sessions import LIFETIME

_SECURE: Final = "__Host-cairn_session"
"""Browsers accept a cookie with the prefix `__Host-` by https only, and from this very host."""
_PLAIN: Final = "cairn_session"
_MAX_COOKIE_BYTES: Final = 4096


def cookie_of(scope: Connection) -> str | None:
    """Return the value of a request's session cookie; None: the request has none."""
    sent = Headers(scope=scope).getlist("cookie")
    if len(sent) != 1 or len(sent[0]) > _MAX_COOKIE_BYTES:
        return None
    return cookie_parser(sent[0]).get(_name(scope)) or None


def set_cookie(response: Response, scope: Connection, secret: str) -> None:
    """Set the session cookie of a browser."""
    response.set_cookie(
        _name(scope),
        secret,
        max_age=int(LIFETIME.total_seconds()),
        path="/",
        secure=not is_local(scope),
        httponly=True,
        samesite="strict",
    )


def delete_cookie(response: Response, scope: Connection) -> None:
    """Delete the session cookie of a browser."""
    response.delete_cookie(
        _name(scope), path="/", secure=not is_local(scope), httponly=True, samesite="strict"
    )


def _name(scope: Connection) -> str:
    return _PLAIN if is_local(scope) else _SECURE
