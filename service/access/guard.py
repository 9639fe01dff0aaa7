"""Who may ask: with keys, whoever shows one, from anywhere; everybody else is answered 401."""

import math
from collections.abc import Mapping
from typing import Final, cast

from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as Connection

from cairn.service.access.authenticator import Authenticator
from cairn.service.access.callers import Caller
from cairn.service.access.rates import Rates
from cairn.service.errors import ProblemError, TooManyRequestsError, UnauthenticatedError
from cairn.service.http import problem_from, respond
from cairn.service.settings import Settings

FAILURES_AT_ONCE: Final = 20
FAILURES_PER_SECOND: Final = 1.0
LONGEST_TOKEN: Final = 8192
_ALWAYS_OPEN: Final = frozenset({"/healthz"})
_STATIC: Final = "/static/"
_OPEN: Final = frozenset({"/readyz"})
"""Answered to anybody, and more fully to callers that are known."""


class KeysGuard:
    """Says who asks, or answers 401 before anything else is done.

    What authenticates is `app.state.authenticator`, which the application makes when it starts.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self._open = _OPEN | ({"/metrics"} if settings.metrics_open else frozenset())
        self._rates = Rates(settings.rate_limit, 2 * settings.rate_limit)
        self._failures = Rates(FAILURES_PER_SECOND, FAILURES_AT_ONCE)

    async def __call__(self, scope: Connection, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller, or answer it with a problem."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":  # nothing here speaks WebSocket
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
            caller, key = await self._identify(scope, authenticator)
        except (ProblemError, SQLAlchemyError) as exc:
            await _refuse(scope, receive, send, exc)
            return
        state["caller"] = caller
        try:
            await self.app(scope, receive, send)
        finally:
            if key is not None:
                await authenticator.note_use(key)

    async def _identify(
        self, scope: Connection, authenticator: Authenticator
    ) -> tuple[Caller | None, str | None]:
        """The caller, None where anybody may ask; and the id of their key, if they have one."""
        peer = _peer(scope)
        try:
            caller, key = await self._by_bearer(scope, authenticator, peer)
        except UnauthenticatedError:
            if scope["path"] not in self._open:
                raise
            self._count(peer)
            return None, None
        self._count(caller.name)
        return caller, key

    async def _by_bearer(
        self, scope: Connection, authenticator: Authenticator, peer: str
    ) -> tuple[Caller, str | None]:
        token = _bearer(Headers(scope=scope))
        if not authenticator.recognises(token):
            _hold_back(self._failures, peer, "with keys that do not count, from")
        try:
            return await authenticator.by_bearer(token)
        except UnauthenticatedError:
            self._failures.take(peer)
            raise

    def _count(self, name: str) -> None:
        _hold_back(self._rates, name, "of")
        self._rates.take(name)


def _hold_back(rates: Rates, name: str, whose: str) -> None:
    wait = rates.wait(name)
    if wait > 0:
        seconds = math.ceil(wait)
        raise TooManyRequestsError(
            f"expected fewer requests {whose} {name!r}, found too many. Come back in {seconds} s.",
            headers={"Retry-After": str(seconds)},
        )


def _bearer(headers: Headers) -> str:
    """The token of a request.

    Raises:
        UnauthenticatedError: It has none, or is in doubt about it.
    """
    found = headers.getlist("authorization")
    if not found:
        raise UnauthenticatedError(
            "expected the header `Authorization: Bearer` with a key, found none. `cairn keys "
            "create` makes a key; clients read it from CAIRN_KEY or the file CAIRN_KEY_FILE."
        )
    scheme, _, token = found[0].partition(" ")
    if len(found) > 1 or scheme.lower() != "bearer" or not 0 < len(token) <= LONGEST_TOKEN:
        raise UnauthenticatedError(
            "Authorization: expected one, and that `Bearer` and a key, found another."
        )
    return token.strip()


async def _refuse(scope: Connection, receive: Receive, send: Send, exc: Exception) -> None:
    headers: Mapping[str, str] = exc.headers if isinstance(exc, ProblemError) else {}
    if isinstance(exc, UnauthenticatedError):
        shown = Headers(scope=scope).get("authorization") is not None
        error = ', error="invalid_token"' if shown else ""
        headers = {**headers, "WWW-Authenticate": f'Bearer realm="cairn"{error}'}
    problem = problem_from(exc, instance=scope["path"])
    await respond(problem, headers)(scope, receive, send)


def _peer(scope: Connection) -> str:
    client = scope.get("client")  # None on a Unix socket
    return "this machine" if client is None else str(client[0])
