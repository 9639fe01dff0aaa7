"""Who somebody is, by what they show."""

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
from cairn.service.access.keys import (
    PREFIX,
    Credential,
    caller_of,
    digest_of,
    find_key,
    note_use,
)
from cairn.service.access.rates import Rates
from cairn.service.access.recent import Recent
from cairn.service.access.sessions import begin_session, end_session, find_session, session_of
from cairn.service.catalog import Catalog, KeyRow, SessionRow
from cairn.service.errors import TooManyRequestsError, UnauthenticatedError

logger = logging.getLogger(__name__)

NOTE_EVERY: Final = timedelta(minutes=1)
"""How exactly a key's last use is known."""

VERIFIED_AT_ONCE: Final = 8
"""Tokens of an issuer."""

FAILURES_AT_ONCE: Final = 20
FAILURES_PER_SECOND: Final = 1.0
"""Of one address, with what does not count: from then on 429 instead of 401."""

SIGN_INS_AT_ONCE: Final = 20
SIGN_INS_PER_SECOND: Final = 1.0
"""Of one key: each is a row that is written, and no request that the guard counts."""


class Authenticator:
    """Knows callers by their keys and sessions, as the catalog has them, or by an issuer's tokens.

    Args:
        catalog: With the keys.
        identify: Tells whom a token vouches for, and waits for its issuer; None: none is trusted.
    """

    def __init__(self, catalog: Catalog, identify: Callable[[str], Caller] | None = None) -> None:
        self._catalog = catalog
        self._identify = identify
        self._keys: Recent[KeyRow] = Recent(partial(find_key, catalog))
        self._sessions: Recent[tuple[SessionRow, KeyRow]] = Recent(partial(find_session, catalog))
        self._failures = Rates(FAILURES_PER_SECOND, FAILURES_AT_ONCE)
        self._sign_ins = Rates(SIGN_INS_PER_SECOND, SIGN_INS_AT_ONCE)
        # A silent issuer holds no more threads than these.
        self._verifying = CapacityLimiter(VERIFIED_AT_ONCE)
        self._one_by_one = asyncio.Semaphore(1)
        self._noted: dict[str, datetime] = {}

    async def by_bearer(self, text: str, peer: str) -> Identity:
        """Who shows this bearer token.

        Args:
            text: The token.
            peer: Address of who shows it.

        Raises:
            UnauthenticatedError: It is none of ours, or counts no more.
            TooManyRequestsError: Too many of this address did not count.
            ForbiddenError: It is a token whose bearer is granted nothing.
            NotReadyError: It is a token, and its issuer does not answer.
        """
        credential = Credential.parse(text)
        async with self._failing(
            peer, known=credential is not None and self._keys.knows(credential.id)
        ):
            if credential is None and self._identify is not None and not text.startswith(PREFIX):
                return Identity(await run_sync(self._identify, text, limiter=self._verifying))
            if credential is None:
                raise UnauthenticatedError(
                    "expected a key such as ck_<id>_<secret>, found a text of another form. "
                    "`cairn keys create` makes one; clients read it from CAIRN_KEY."
                )
            row = await self._keys.get(credential.id)
            return Identity(caller_of(row, credential, datetime.now(UTC)), credential.id)

    async def by_session(self, secret: str, peer: str) -> Identity:
        """Whose browser has a cookie that holds this.

        Raises:
            UnauthenticatedError: The session is over.
            TooManyRequestsError: As `by_bearer`.
        """
        digest = digest_of(secret)
        async with self._failing(peer, known=self._sessions.knows(digest)):
            return session_of(await self._sessions.get(digest), secret, datetime.now(UTC))

    async def sign_in(self, key: str, peer: str) -> str:
        """Begin a session for who shows a key; what its cookie shall hold.

        Raises:
            UnauthenticatedError, TooManyRequestsError: As `by_bearer`; or too many with this key.
        """
        identity = await self.by_bearer(key, peer)
        if identity.key is None:
            raise UnauthenticatedError("expected a key such as ck_<id>_<secret>, found a token")
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
        """Note that a key was used, once a minute; if it can't be noted, the log says so."""
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
    async def _failing(self, peer: str, *, known: bool) -> AsyncIterator[None]:
        """Count failures; what an address shows that has had too many is looked at one by one.

        It is looked at all the same: others may share the address, behind a proxy or a router, and
        nobody locks them out.
        """
        wait = 0.0 if known else self._failures.wait(peer)
        try:
            async with self._one_by_one if wait > 0 else nullcontext():
                yield
        except UnauthenticatedError as exc:
            if wait > 0:
                raise too_many(f"with keys that do not count from {peer}", wait) from exc
            self._failures.take(peer)
            raise


def too_many(what: str, wait: float) -> TooManyRequestsError:
    """The answer to who has to wait.

    Args:
        what: What there were too many requests of.
        wait: Seconds.
    """
    seconds = math.ceil(wait)
    return TooManyRequestsError(
        f"expected fewer requests {what}, found too many. Come back in {seconds} s.",
        headers={"Retry-After": str(seconds)},
    )
