"""Authentication of callers by key, session cookie or issuer token."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from cairn.service.access.callers import Caller, Identity
from cairn.service.access.keys import PREFIX, Credential, caller_of, digest_of, find_key, note_use
from cairn.service.access.pending_sign_in import PendingSignIn
from cairn.service.access.rate_limiter import RateLimiter
from cairn.service.access.sessions import (
    CONFIRM_AFTER,
    UNCONFIRMED_AFTER,
    Session,
    begin_confirmation,
    begin_session,
    caller_columns,
    confirm_session,
    end_session,
    find_session,
    new_secret,
    session_of,
)
from cairn.service.access.ttl_cache import TTLCache
from cairn.service.catalog.audit import AuditEntry, audited
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import KeyRow, SessionRow
from cairn.service.errors import (
    ForbiddenError,
    NotReadyError,
    TooManyRequestsError,
    UnauthenticatedError,
)
from cairn.service.observability.ids import request_id

if TYPE_CHECKING:  # imports httpx and cryptography: 0.5 s
    from cairn.service.access.provider import Provider

logger = logging.getLogger(__name__)

NOTE_EVERY: Final = timedelta(minutes=1)
"""Shortest time between two updates of a key's recorded last use."""

VERIFIED_AT_ONCE: Final = 8
"""Largest number of tokens that are verified with the issuer at the same time."""

FAILURES_AT_ONCE: Final = 20
FAILURES_PER_SECOND: Final = 1.0
"""Failed authentications per second that an address may have.

Beyond it, the answer to one that fails is 429 instead of 401.
"""

SIGN_INS_AT_ONCE: Final = 20
SIGN_INS_PER_SECOND: Final = 1.0
"""Sign-ins per second that a key or person may have.

Each sign-in writes a row, and the guard's own rate limit does not count sign-in requests.
"""

REFUSALS_AT_ONCE: Final = 100
REFUSALS_PER_SECOND: Final = 1.0
"""Refused sign-ins per second in the audit trail. Strangers must not be able to fill it.

The log has those beyond.
"""

CONFIRMATION_SECONDS: Final = 6.0
"""Longest time that a request waits for another request's confirmation of the same session."""

_LOOK_SECONDS: Final = 0.1
"""Time between two looks at it."""

_LONGEST_REASON: Final = 500
"""Characters of a refusal's reason in the audit trail."""


class Authenticator:
    """Authenticator of callers, by keys and sessions in the catalog or by an issuer's tokens.

    Args:
        catalog: Catalog that has the keys.
        identify: Function that returns the caller of an issuer's bearer token. It may block while
            it asks the issuer. None: no bearer tokens are trusted.
        provider: Identity provider at which people sign in. None: there is none.
        lifetime: Longest time that a browser stays signed in.
    """

    def __init__(
        self,
        catalog: Catalog,
        identify: Callable[[str], Caller] | None = None,
        *,
        provider: Provider | None = None,
        lifetime: timedelta = timedelta(hours=12),
    ) -> None:
        self.provider = provider
        self.lifetime = lifetime
        self._catalog = catalog
        self._identify = identify
        self._keys: TTLCache[KeyRow] = TTLCache(partial(find_key, catalog))
        self._sessions: TTLCache[Session] = TTLCache(partial(find_session, catalog))
        self._failures = RateLimiter(FAILURES_PER_SECOND, FAILURES_AT_ONCE)
        self._sign_ins = RateLimiter(SIGN_INS_PER_SECOND, SIGN_INS_AT_ONCE)
        self._refusals = RateLimiter(REFUSALS_PER_SECOND, REFUSALS_AT_ONCE)
        # Bounds the threads that wait for an issuer which does not answer.
        self._verifying = CapacityLimiter(VERIFIED_AT_ONCE)
        self._one_by_one = asyncio.Semaphore(1)
        self._noted: dict[str, datetime] = {}

    async def by_bearer(self, text: str, peer: str) -> Identity:
        """Identify the caller that sends a bearer token.

        Args:
            text: Bearer token: a key, or a token of the issuer.
            peer: Address of the client.

        Raises:
            UnauthenticatedError: The key or token is unknown, revoked or expired.
            TooManyRequestsError: Too many authentications from this address failed.
            ForbiddenError: The token is valid, but its bearer is granted nothing.
            NotReadyError: The issuer is needed to verify the token, and does not answer.
        """
        credential = Credential.parse(text)
        async with self._failing(
            peer, is_known=credential is not None and self._keys.has(credential.id)
        ):
            if credential is None and self._identify is not None and not text.startswith(PREFIX):
                return Identity(await run_sync(self._identify, text, limiter=self._verifying))
            if credential is None:
                raise UnauthenticatedError(
                    "This is not a valid key: keys look like ck_<id>_<secret>. "
                    "`cairn keys create` creates one; clients read it from CAIRN_KEY."
                )
            row = await self._keys.get(credential.id)
            return Identity(caller_of(row, credential, datetime.now(UTC)), credential.id)

    async def by_session(self, secret: str, peer: str) -> Identity:
        """Identify the caller whose session cookie holds this secret.

        Raises:
            UnauthenticatedError: The session is over.
            TooManyRequestsError: See `by_bearer`.
            ForbiddenError: The provider has signed the caller in, but grants nothing any more.
            NotReadyError: The provider has to confirm the session, and does not answer.
        """
        digest = digest_of(secret)
        async with self._failing(peer, is_known=self._sessions.has(digest)):
            session = await self._sessions.get(digest)
            now = datetime.now(UTC)
            if session is not None and session.key is None and self.provider is None:
                session = None  # the settings have no provider any more
            if session is not None and session.row.expires > now:
                session = await self._confirmed(session, secret)
            return session_of(session, secret, now)

    async def sign_in(self, key: str, peer: str) -> str:
        """Begin a session for the owner of a key, and return the secret for its cookie.

        Raises:
            UnauthenticatedError, TooManyRequestsError: See `by_bearer`; also too many sign-ins with
                this key.
        """
        try:
            identity = await self.by_bearer(key, peer)
            if identity.key is None:
                raise UnauthenticatedError(
                    "Sign in with a key (ck_<id>_<secret>), not with a token."
                )
        except (UnauthenticatedError, ForbiddenError) as exc:
            await run_in_threadpool(self._note_refusal, exc, by="key")
            raise
        self._count_sign_in(identity.key, f"with the key of {identity.caller.name!r}")
        secret, now = new_secret(), datetime.now(UTC)
        row = SessionRow(digest=digest_of(secret), key_id=identity.key, expires=now + self.lifetime)
        await run_in_threadpool(self._begin, row, identity.caller, by="key", id=identity.key)
        return secret

    async def begin_sign_in(self, redirect_uri: str, target: str) -> tuple[str, PendingSignIn]:
        """Begin a sign-in at the provider; see `Provider.begin`.

        Raises:
            NotReadyError: The provider does not answer, or there is none.
        """
        begin = partial(self._needed_provider().begin, redirect_uri, target)
        return await run_sync(begin, limiter=self._verifying)

    async def finish_sign_in(
        self, pending: PendingSignIn, code: str, redirect_uri: str, peer: str
    ) -> str:
        """Begin a session for a person whom the provider sends, and return its cookie's secret.

        Raises:
            UnauthenticatedError: The provider does not confirm the sign-in.
            ForbiddenError: The person is granted nothing.
            TooManyRequestsError: Too many sign-ins of this person, or failed ones of this address.
            NotReadyError: The provider does not answer, or there is none.
        """
        provider = self._needed_provider()
        finish = partial(provider.finish, pending, code, redirect_uri)
        name = ""
        try:
            async with self._failing(peer, is_known=False):
                person = await run_sync(finish, limiter=self._verifying)
                name = provider.name(person)
                caller = provider.granted(person)
        except (UnauthenticatedError, ForbiddenError) as exc:
            await run_in_threadpool(self._note_refusal, exc, by="provider", actor=name)
            raise
        self._count_sign_in(name, f"as {name!r}")
        secret, now = new_secret(), datetime.now(UTC)
        # Without a refresh token the provider cannot be asked again: the session is short.
        lifetime = self.lifetime if person.refresh_token else min(self.lifetime, UNCONFIRMED_AFTER)
        row = SessionRow(
            digest=digest_of(secret),
            expires=now + lifetime,
            confirmed=now,
            tokens=person.seal(secret),
            **caller_columns(caller),
        )
        await run_in_threadpool(self._begin, row, caller, by="provider")
        return secret

    async def refuse_sign_in(self, exc: UnauthenticatedError, peer: str) -> NoReturn:
        """Count and record a sign-in that the provider did not send, or refused.

        Raises:
            UnauthenticatedError, TooManyRequestsError: Always.
        """
        try:
            async with self._failing(peer, is_known=False):
                raise exc
        except UnauthenticatedError:
            await run_in_threadpool(self._note_refusal, exc, by="provider")
            raise

    async def sign_out(self, secret: str, return_to: str) -> str | None:
        """End a session; return the URL at which its browser also signs out of the provider.

        Args:
            secret: Secret of the session's cookie.
            return_to: URL of this server that the provider sends the browser back to.
        """
        digest = digest_of(secret)
        session = await run_in_threadpool(find_session, self._catalog, digest)
        if session is None:
            return None
        await run_in_threadpool(self._end, session, reason="sign-out")
        tokens = session.row.tokens
        if tokens is None or self.provider is None:
            return None
        url = partial(self.provider.sign_out_url, tokens, secret, return_to)
        return await run_sync(url, limiter=self._verifying)

    async def _confirmed(self, session: Session, secret: str) -> Session | None:
        """Return a session, confirmed by the provider if it is time; None: it has ended meanwhile.

        One request asks the provider, in whichever server it is. Others use what was confirmed
        before, or wait for it.
        """
        digest, until = session.row.digest, time.monotonic() + CONFIRMATION_SECONDS
        while not session.confirmed_since((now := datetime.now(UTC)) - CONFIRM_AFTER):
            still_counts = session.confirmed_since(now - UNCONFIRMED_AFTER)
            begin = partial(begin_confirmation, self._catalog, digest, now=now)
            if await run_in_threadpool(begin):
                ask = partial(self._confirm, digest, secret, now)
                try:
                    await run_sync(ask, limiter=self._verifying)  # to its end, if cancelled
                except NotReadyError:
                    if not still_counts:
                        raise
                    return session
            elif still_counts:
                return session
            elif time.monotonic() > until:
                raise NotReadyError(
                    "The identity provider has not confirmed the session yet. Try again.",
                    headers={"Retry-After": "1"},
                )
            else:
                await asyncio.sleep(_LOOK_SECONDS)
            latest = await run_in_threadpool(find_session, self._catalog, digest)
            if latest is None:
                return None
            session = latest
        return session

    def _confirm(self, digest: str, secret: str, now: datetime) -> None:
        """Ask the provider to confirm a session; end the session if it does not."""
        provider = self._needed_provider()
        # What the caller knows may be old: another request has used that refresh token since.
        session = find_session(self._catalog, digest)
        if session is None or session.confirmed_since(now - CONFIRM_AFTER):
            return
        try:
            person = provider.renew(session.row.tokens or "", secret)
            caller = provider.granted(person)
        except (UnauthenticatedError, ForbiddenError) as exc:
            self._end(session, reason=exc.detail[:_LONGEST_REASON])
            raise
        confirm_session(self._catalog, digest, caller, person.seal(secret), now=now)
        self._sessions.forget(digest)

    def _needed_provider(self) -> Provider:
        if self.provider is None:
            raise NotReadyError(
                "CAIRN_OIDC_CLIENT_ID: expected the client id of this server at the identity "
                "provider, found none. Sign in with a key."
            )
        return self.provider

    def _count_sign_in(self, owner: str, whose: str) -> None:
        wait = self._sign_ins.wait(owner)
        if wait > 0:
            raise too_many(f"to sign in {whose}", wait)
        self._sign_ins.take(owner)

    def _begin(self, row: SessionRow, caller: Caller, **detail: str) -> None:
        now = datetime.now(UTC)
        detail |= {"scope": caller.scope.value}
        with self._audited("session.begin", caller.name, detail):
            begin_session(self._catalog, row, now=now)

    def _end(self, session: Session, *, reason: str) -> None:
        with self._audited("session.end", session.name, {"reason": reason}):
            end_session(self._catalog, session.row.digest)
        self._sessions.forget(session.row.digest)

    def _note_refusal(
        self, exc: UnauthenticatedError | ForbiddenError, *, by: str, actor: str = ""
    ) -> None:
        detail = {"by": by, "reason": exc.detail[:_LONGEST_REASON]}
        if self._refusals.wait("") > 0:
            logger.warning("a sign-in of %r with the %s was refused: %s", actor, by, exc.detail)
            return
        self._refusals.take("")
        with suppress(type(exc)), self._audited("session.begin", actor, detail):
            raise exc

    def _audited(
        self, action: str, actor: str, detail: dict[str, str]
    ) -> AbstractContextManager[AuditEntry]:
        identity = request_id() or ""
        return audited(self._catalog, action, actor=actor, detail=detail, request_id=identity)

    async def note_use(self, key: str) -> None:
        """Record that a key was used, at most once a minute; a failure is logged and not raised."""
        now = datetime.now(UTC)
        try:
            row = await self._keys.get(key)
            noted = self._noted.get(key) or (row.last_used if row is not None else None)
            if noted is not None and now - noted < NOTE_EVERY:
                return
            self._noted[key] = now
            await run_in_threadpool(note_use, self._catalog, key, now=now)
        except SQLAlchemyError as exc:
            logger.warning("the last use of key %s could not be noted: %s", key, exc)

    @asynccontextmanager
    async def _failing(self, peer: str, *, is_known: bool) -> AsyncIterator[None]:
        """Count the failed authentications of an address; serialize its requests if there are many.

        An address with many failures is not refused: other clients may share it, behind a proxy or
        a router, and must not be locked out.
        """
        wait = 0.0 if is_known else self._failures.wait(peer)
        try:
            async with self._one_by_one if wait > 0 else nullcontext():
                yield
        except UnauthenticatedError as exc:
            if wait > 0:
                raise too_many(f"with keys that do not count from {peer}", wait) from exc
            self._failures.take(peer)
            raise


def too_many(what: str, wait: float) -> TooManyRequestsError:
    """Return the 429 error for a caller who has to wait.

    Args:
        what: Kind of request that came too often.
        wait: Seconds to wait.
    """
    seconds = math.ceil(wait)
    return TooManyRequestsError(
        f"Too many requests {what}. Try again in {seconds} s.",
        headers={"Retry-After": str(seconds)},
    )
