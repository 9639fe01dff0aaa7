"""Sessions of browsers: begun with a key, ended by signing out, in time, or with their key."""

import secrets
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import delete, select

from cairn.service.access.callers import Identity
from cairn.service.access.keys import check_counts, digest_of, key_caller
from cairn.service.catalog import Catalog, KeyRow, SessionRow
from cairn.service.errors import UnauthenticatedError

LIFETIME: Final = timedelta(hours=12)
MOST: Final = 100
"""Sessions of one key at a time."""
_BYTES: Final = 32


def begin_session(catalog: Catalog, key: str, *, now: datetime) -> str:
    """Sign a browser in with the key of an id; what its cookie shall hold.

    Sessions that are over are forgotten; of too many that one key has, the oldest ends.
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
        too_many = session.scalars(latest.offset(MOST - 1)).all()
        session.execute(delete(SessionRow).where(SessionRow.digest.in_(too_many)))
        session.add(row)
    return secret


def find_session(catalog: Catalog, digest: str) -> tuple[SessionRow, KeyRow] | None:
    """The session whose cookie has this digest, and its key."""
    with catalog.read() as session:
        row = session.get(SessionRow, digest)
        key = None if row is None else session.get(KeyRow, row.key_id)
        return None if row is None or key is None else (row, key)


def end_session(catalog: Catalog, secret: str) -> None:
    """Sign a browser out."""
    with catalog.write() as session:
        session.execute(delete(SessionRow).where(SessionRow.digest == digest_of(secret)))


def session_of(found: tuple[SessionRow, KeyRow] | None, secret: str, now: datetime) -> Identity:
    """Whose session it is.

    Args:
        found: What is kept of it and its key, if anything.
        secret: What its cookie holds.
        now: When.

    Raises:
        UnauthenticatedError: It is over, or its key counts no more.
    """
    if found is None or found[0].expires <= now:
        raise UnauthenticatedError("expected a browser that is signed in, found one that is not")
    key = found[1]
    check_counts(key, now)
    return Identity(key_caller(key), key.id, csrf=digest_of(f"csrf {secret}"))
