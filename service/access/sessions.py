"""Browser sessions, begun with a key or at the identity provider.

Each is a row, so that sign-out, revoked keys and lost groups count in every server at once. It ends
by sign-out, by age, or with its key or the provider's confirmation.
"""

import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, cast

from sqlalchemy import CursorResult, delete, or_, select, update

from cairn.service.access.callers import Caller, Identity, Scope
from cairn.service.access.keys import check_counts, digest_of, key_caller
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import KeyRow, SessionRow
from cairn.service.errors import UnauthenticatedError

MAX_SESSIONS: Final = 100
"""Sessions of one key or person at a time."""

CONFIRM_AFTER: Final = timedelta(minutes=5)
"""Age of the provider's confirmation at which a request asks for a new one.

Until it arrives, others go on with the old one.
"""

UNCONFIRMED_AFTER: Final = timedelta(minutes=10)
"""Age of the provider's confirmation beyond which it counts for nothing."""

CONFIRM_EVERY: Final = timedelta(seconds=30)
"""Shortest time between two requests to the provider for one session; no request takes longer."""

_BYTES: Final = 32


@dataclass(frozen=True)
class Session:
    """Stored session; the key is None if the provider confirms its caller."""

    row: SessionRow
    key: KeyRow | None

    @property
    def name(self) -> str:
        """Name of its caller."""
        return self.row.name or "" if self.key is None else self.key.name

    def confirmed_since(self, moment: datetime) -> bool:
        """Return whether the session needs no confirmation, or the last one is not older."""
        return self.row.confirmed is None or self.row.confirmed > moment


def new_secret() -> str:
    """Return a new secret for a session's cookie."""
    return secrets.token_urlsafe(_BYTES)


def begin_session(catalog: Catalog, row: SessionRow, *, now: datetime) -> None:
    """Store a new session.

    Expired sessions are deleted. If its owner has too many sessions, the oldest ones end.
    """
    is_owners = (
        SessionRow.key_id == row.key_id if row.key_id is not None else SessionRow.name == row.name
    )
    with catalog.write() as session:
        session.execute(delete(SessionRow).where(SessionRow.expires <= now))
        latest = select(SessionRow.digest).where(is_owners).order_by(SessionRow.expires.desc())
        too_many = session.scalars(latest.offset(MAX_SESSIONS - 1)).all()
        session.execute(delete(SessionRow).where(SessionRow.digest.in_(too_many)))
        session.add(row)


def find_session(catalog: Catalog, digest: str) -> Session | None:
    """Return the session whose cookie has this digest; None: there is none."""
    with catalog.read() as session:
        row = session.get(SessionRow, digest)
        if row is None or row.key_id is None:
            return None if row is None else Session(row, None)
        key = session.get(KeyRow, row.key_id)
        return None if key is None else Session(row, key)


def end_session(catalog: Catalog, digest: str) -> None:
    """End the session whose cookie has this digest, if there is one."""
    with catalog.write() as session:
        session.execute(delete(SessionRow).where(SessionRow.digest == digest))


def begin_confirmation(catalog: Catalog, digest: str, *, now: datetime) -> bool:
    """Return whether this request asks the provider to confirm a session, and no other one does.

    A provider that rotates refresh tokens ends the session of two that use the same.
    """
    free = or_(SessionRow.confirming.is_(None), SessionRow.confirming <= now - CONFIRM_EVERY)
    with catalog.write() as session:
        begun = session.execute(
            update(SessionRow).where(SessionRow.digest == digest, free).values(confirming=now)
        )
        return cast("CursorResult[object]", begun).rowcount == 1


def confirm_session(
    catalog: Catalog, digest: str, caller: Caller, tokens: str, *, now: datetime
) -> None:
    """Store the provider's confirmation of a session."""
    with catalog.write() as session:
        session.execute(
            update(SessionRow)
            .where(SessionRow.digest == digest)
            .values(confirmed=now, tokens=tokens, **caller_columns(caller))
        )


def caller_columns(caller: Caller) -> dict[str, object]:
    """Return the columns of a session's caller."""
    roots = None if caller.roots is None else sorted(caller.roots)
    return {"name": caller.name, "scope": caller.scope.value, "roots": roots}


def session_of(session: Session | None, secret: str, now: datetime) -> Identity:
    """Verify a session, and return the identity of its caller.

    Args:
        session: Stored session; None: there is none.
        secret: Secret in the session's cookie.
        now: Current time.

    Raises:
        UnauthenticatedError: The session is over, its key is revoked or expired, or the provider
            has not confirmed it for too long.
    """
    if (
        session is None
        or session.row.expires <= now
        or not session.confirmed_since(now - UNCONFIRMED_AFTER)
    ):
        raise UnauthenticatedError("The session has ended. Sign in again.")
    csrf = digest_of(f"csrf {secret}")
    if session.key is not None:
        check_counts(session.key, now)
        return Identity(key_caller(session.key), session.key.id, csrf)
    row = session.row
    roots = None if row.roots is None else frozenset(row.roots)
    return Identity(Caller(row.name or "", Scope(row.scope or ""), roots), csrf=csrf)
