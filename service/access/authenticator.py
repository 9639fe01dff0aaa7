"""Authentication of callers by key, session cookie or issuer token."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from sqlalchemy.exc import SQLAlchemyError
from starlette.concurrency import run_in_threadpool

from cairn.service.access.callers import Caller, Identity
from cairn.service.access.keys import PREFIX, Credential, caller_of, digest_of, find_key, note_use
from cairn.service.access.rate_limiter import RateLimiter
from cairn.service.access.sessions import begin_session, end_session, find_session, session_of
from cairn.service.access.ttl_cache import TTLCache
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import KeyRow, SessionRow
from cairn.service.errors import TooManyRequestsError, UnauthenticatedError

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
"""Sign-ins per second that a key may have.

Each sign-in writes a row, and the guard's own rate limit does not count sign-in requests.
"""


class Authenticator:
    """Authenticator of callers, by keys and sessions in the catalog or by an issuer's tokens.

    Args:
        catalog: Catalog that has the keys.
        identify: Function that returns the caller of an issuer's token. It may block while it asks
            the issuer. None: no issuer is trusted.
    """

    def __init__(self, catalog: Catalog, identify: Callable[[str], Caller] | None = None) -> None:
        self._catalog = catalog
        self._identify = identify
        self._keys: TTLCache[KeyRow] = TTLCache(partial(find_key, catalog))
        self._sessions: TTLCache[tuple[SessionRow, KeyRow]] = TTLCache(
            partial(find_session, catalog)
        )
        self._failures = RateLimiter(FAILURES_PER_SECOND, FAILURES_AT_ONCE)
        self._sign_ins = RateLimiter(SIGN_INS_PER_SECOND, SIGN_INS_AT_ONCE)
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
        """
        digest = digest_of(secret)
        async with self._failing(peer, is_known=self._sessions.has(digest)):
            return session_of(await self._sessions.get(digest), secret, datetime.now(UTC))

    async def sign_in(self, key: str, peer: str) -> str:
        """Begin a session for the owner of a key, and return the secret for its cookie.

        Raises:
            UnauthenticatedError, TooManyRequestsError: See `by_bearer`; also too many sign-ins with
                this key.
        """
        identity = await self.by_bearer(key, peer)
        if identity.key is None:
            raise UnauthenticatedError("Sign in with a key (ck_<id>_<secret>), not with a token.")
        wait = self._sign_ins.wait(identity.key)
        if wait > 0:
            raise too_many(f"to sign in with the key of {identity.caller.name!r}", wait)
        self._sign_ins.take(identity.key)
        begin = partial(begin_session, self._catalog, identity.key, now=datetime.now(UTC))
        return await run_in_threadpool(begin)

    async def sign_out(self, secret: str) -> None:
        """End a session."""
        await run_in_threadpool(end_session, self._catalog, secret)
        self._sessions.forget(digest_of(secret))

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
