"""Cookies of browsers: sent by https only, except to a browser on the server's own machine."""

from datetime import timedelta
from typing import Final

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import Response
from starlette.types import Scope as Connection

from cairn.service.access.origins import is_local

SESSION: Final = "cairn_session"
PENDING_SIGN_IN: Final = "cairn_sign_in"

_SECURE_PREFIX: Final = "__Host-"
"""Browsers accept a cookie with this prefix by https only, and from this very host."""
_MAX_COOKIE_BYTES: Final = 4096


def cookie_of(scope: Connection, name: str = SESSION) -> str | None:
    """Return the value of a request's cookie; None: the request has none."""
    sent = Headers(scope=scope).getlist("cookie")
    if len(sent) != 1 or len(sent[0]) > _MAX_COOKIE_BYTES:
        return None
    return cookie_parser(sent[0]).get(_full_name(scope, name)) or None


def set_cookie(
    response: Response, scope: Connection, value: str, *, lifetime: timedelta, name: str = SESSION
) -> None:
    """Set a cookie of a browser.

    Links and redirects of other sites send it (SameSite=Lax), for otherwise nobody would be signed
    in who comes from the identity provider. Their forms and scripts do not.
    """
    response.set_cookie(
        _full_name(scope, name),
        value,
        max_age=int(lifetime.total_seconds()),
        path="/",
        secure=not is_local(scope),
        httponly=True,
        samesite="lax",
    )


def delete_cookie(response: Response, scope: Connection, name: str = SESSION) -> None:
    """Delete a cookie of a browser."""
    response.delete_cookie(
        _full_name(scope, name),
        path="/",
        secure=not is_local(scope),
        httponly=True,
        samesite="lax",
    )


def _full_name(scope: Connection, name: str) -> str:
    return name if is_local(scope) else f"{_SECURE_PREFIX}{name}"
