"""Browser sessions: they begin with a key, and end by sign-out, by age, or with their key."""

import secrets
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, select

from cairn.service.access.callers import Identity
from cairn.service.access.keys import check_counts, digest_of, key_caller
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import KeyRow, SessionRow
from cairn.service.errors import UnauthenticatedError

LIFETIME: Final = timedelta(hours=12)
MAX_SESSIONS: Final = 100
"""Sessions of one key at a time."""
_BYTES: Final = 32


def begin_session(catalog: Catalog, key: str, *, now: datetime) -> str:
    """Begin a session for the owner of a key, and return the secret for its cookie.

    Expired sessions are deleted. If the key has too many sessions, the oldest ones end.
    """
    secret = secrets.token_urlsafe(_BYTES)
    row = SessionRow(digest=digest_of(secret), key_id=key, expires=now + LIFETIME)
    with catalog.write() as session:
        session.execute(delete(SessionRow).where(SessionRow.expires <= now))
        latest = (
            select(SessionRow.digest)
            .where(SessionRow.key_id == key)
            .order_by(SessionRow.expires.desc())
        )
        too_many = session.scalars(latest.offset(MAX_SESSIONS - 1)).all()
        session.execute(delete(SessionRow).where(SessionRow.digest.in_(too_many)))
        session.add(row)
    return secret


def find_session(catalog: Catalog, digest: str) -> tuple[SessionRow, KeyRow] | None:
    """Return the session whose cookie has this digest, with its key; None: there is none."""
    with catalog.read() as session:
        row = session.get(SessionRow, digest)
        key = None if row is None else session.get(KeyRow, row.key_id)
        return None if row is None or key is None else (row, key)


def end_session(catalog: Catalog, secret: str) -> None:
    """End the session whose cookie has this secret, if there is one."""
    with catalog.write() as session:
        session.execute(delete(SessionRow).where(SessionRow.digest == digest_of(secret)))


def session_of(row: tuple[SessionRow, KeyRow] | None, secret: str, now: datetime) -> Identity:
    """Verify a session, and return the identity of its caller.

    Args:
        row: Stored session and key; None: there is none.
        secret: Secret in the session's cookie.
        now: Current time.

    Raises:
        UnauthenticatedError: The session is over, or its key is revoked or expired.
    """
    if row is None or row[0].expires <= now:
        raise UnauthenticatedError("The session has ended. Sign in again.")
    key = row[1]
    check_counts(key, now)
    return Identity(key_caller(key), key.id, csrf=digest_of(f"csrf {secret}"))
