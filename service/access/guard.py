"""Guard for a server with keys: answers 401 to everybody who sends no valid credential."""

from collections import Counter
from hmac import compare_digest
from typing import Final, cast
from urllib.parse import quote

from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from cairn.service.access.authenticator import Authenticator, too_many
from cairn.service.access.callers import Identity
from cairn.service.access.cookies import cookie_of
from cairn.service.access.origins import SAFE_METHODS, peer_name, require_own_page
from cairn.service.access.rate_limiter import RateLimiter
from cairn.service.errors import ForbiddenError, ProblemError, UnauthenticatedError
from cairn.service.http.problems import answer
from cairn.service.settings import Settings

SIGN_IN: Final = "/sign-in"
PROVIDER: Final = "/sign-in/provider"
CALLBACK: Final = "/sign-in/callback"
CSRF_HEADER: Final = "x-csrf-token"
MAX_TOKEN_LENGTH: Final = 8192
UNDER_WAY: Final = 100
"""Largest number of requests of one caller at a time.

Event streams and downloads stay open for long, and use memory all the while.
"""
_STATIC: Final = "/static/"
_ALWAYS_OPEN: Final = frozenset({"/healthz", SIGN_IN, PROVIDER, CALLBACK})
_OPEN: Final = frozenset({"/readyz"})
"""Paths that anybody may request; authenticated callers get a longer answer."""


class KeysGuard:
    """ASGI middleware that identifies the caller, or answers 401 before any other work.

    It authenticates with `app.state.authenticator`, which the application makes when it starts.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._open = _OPEN | ({"/metrics"} if settings.metrics_open else frozenset())
        self._rates = RateLimiter(settings.rate_limit, 2 * settings.rate_limit)
        self._under_way: Counter[str] = Counter()

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller, or answer it with a problem."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route is a WebSocket
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        state = scope.setdefault("state", {})
        state["caller"] = None
        path = scope["path"]
        if path in _ALWAYS_OPEN or path.startswith(_STATIC):
            await self.app(scope, receive, send)
            return
        authenticator = cast(Authenticator, scope["app"].state.authenticator)
        try:
            identity = await self._identify(scope, authenticator)
        except (ProblemError, SQLAlchemyError) as exc:
            await _refuse(scope, receive, send, exc)
            return
        if identity is None:
            await self.app(scope, receive, send)
            return
        state["caller"], state["csrf"] = identity.caller, identity.csrf
        name = identity.caller.name
        self._under_way[name] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._under_way[name] -= 1
            if self._under_way[name] == 0:
                del self._under_way[name]
            if identity.key is not None:
                await authenticator.note_use(identity.key)

    async def _identify(self, scope: Connection, authenticator: Authenticator) -> Identity | None:
        """Identify the caller; None: the caller is unknown, and the path is open to anybody."""
        peer = peer_name(scope)
        try:
            identity = await _identify_by_credential(scope, authenticator, peer)
        except (UnauthenticatedError, ForbiddenError):  # Forbidden: a valid token without grants
            if scope["path"] not in self._open:
                raise
            self._count(f"from {peer}")
            return None
        self._count(f"of {identity.caller.name!r}")
        if self._under_way[identity.caller.name] >= UNDER_WAY:
            raise too_many(f"of {identity.caller.name!r} at a time than {UNDER_WAY}", 1)
        return identity

    def _count(self, whose: str) -> None:
        wait = self._rates.wait(whose)
        if wait > 0:
            raise too_many(whose, wait)
        self._rates.take(whose)


async def _identify_by_credential(
    scope: Connection, authenticator: Authenticator, peer: str
) -> Identity:
    """Identify the caller by the `Authorization` header, or else by the session cookie.

    Raises:
        UnauthenticatedError: The request has no valid credential.
        ForbiddenError: A page of another site makes the browser send this request.
    """
    headers = Headers(scope=scope)
    shown = headers.getlist("authorization")
    if shown:
        scheme, _, token = shown[0].partition(" ")
        if len(shown) > 1 or scheme.lower() != "bearer" or not 0 < len(token) <= MAX_TOKEN_LENGTH:
            raise UnauthenticatedError(
                "Authorization: send the header once, with `Bearer` and a key."
            )
        return await authenticator.by_bearer(token.strip(), peer)
    secret = cookie_of(scope)
    if secret is None:
        raise UnauthenticatedError(
            "A key is needed, in the header `Authorization: Bearer`. `cairn keys create` makes "
            "one; clients read it from CAIRN_KEY or the file CAIRN_KEY_FILE."
        )
    identity = await authenticator.by_session(secret, peer)
    if scope["method"] in SAFE_METHODS or identity.csrf is None:
        return identity
    # A browser sends its cookie with requests of any page, so the CSRF token has to prove the page.
    require_own_page(scope)
    if not compare_digest(headers.get(CSRF_HEADER, "").encode(), identity.csrf.encode()):
        raise ForbiddenError("X-CSRF-Token: the page is of another session. Reload it.")
    return identity


async def _refuse(scope: Connection, receive: Receive, send: Send, exc: Exception) -> None:
    sent = Headers(scope=scope)
    headers = {}
    if isinstance(exc, UnauthenticatedError):
        shown = "authorization" in sent
        if not shown and scope["method"] == "GET" and "text/html" in sent.get("accept", ""):
            query = scope["query_string"].decode("latin-1")
            target = scope["path"] + (f"?{query}" if query else "")
            sign_in = f"{SIGN_IN}?next={quote(target, safe='')}"
            await RedirectResponse(sign_in, status_code=303)(scope, receive, send)
            return
        error = ', error="invalid_token"' if shown else ""
        headers = {"WWW-Authenticate": f'Bearer realm="cairn"{error}'}
    response = answer(exc, method=scope["method"], path=scope["path"], headers=headers)
    await response(scope, receive, send)
