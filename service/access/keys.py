"""Keys of callers, `ck_<id>_<secret>`: create, verify, revoke. Only a key's digest is stored."""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from sqlalchemy import ColumnElement, Connection, or_, select, update
from sqlalchemy.orm import Session

from cairn.service.access.callers import Caller, Scope
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.models import KeyRow
from cairn.service.errors import KeyNameTakenError, UnauthenticatedError, UnknownKeyError

PREFIX: Final = "ck_"
_ID_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz234567"
_ID_LENGTH: Final = 12
_SECRET_BYTES: Final = 32
_KEY: Final = re.compile(r"ck_([a-z2-7]{12})_[A-Za-z0-9_-]{43}")
_TABLE: Final = ("", "keys")
"""Root and run of the lock under which keys are written; see `Catalog.write`."""


@dataclass(frozen=True)
class Credential:
    """Id and digest of a key that a caller sent; neither reveals the key.

    Attributes:
        id: Id of the key.
        digest: SHA-256 of the whole key, in hex.
    """

    id: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> "Credential | None":
        """Parse a key; None: the text does not have the form of a key."""
        match = _KEY.fullmatch(text)
        return None if match is None else cls(match[1], digest_of(text))


def digest_of(secret: str) -> str:
    """Return the SHA-256 of a secret, in hex.

    A plain hash is enough to store: the secret has too much entropy to be guessed.
    """
    return sha256(secret.encode()).hexdigest()


def make_key(
    catalog: Catalog,
    *,
    name: str,
    scope: Scope,
    roots: Iterable[str] | None,
    expires: datetime | None,
    by: str,
    now: datetime,
) -> tuple[KeyRow, str]:
    """Create a key, and return its row and the key's text, which is never available again.

    Args:
        catalog: Catalog to store it in.
        name: Name of its caller, for the audit trail.
        scope: Scope that the caller gets.
        roots: Roots that the caller may use; None: all roots.
        expires: Time when the key expires; None: never.
        by: Name of the caller who creates it.
        now: Current time.

    Raises:
        KeyNameTakenError: Another valid key has the name.
    """
    identity = "".join(secrets.choice(_ID_LETTERS) for _ in range(_ID_LENGTH))
    key = f"{PREFIX}{identity}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    row = KeyRow(
        id=identity,
        digest=digest_of(key),
        name=name,
        scope=scope.value,
        roots=None if roots is None else sorted(set(roots)),
        created=now,
        created_by=by,
        expires=expires,
    )
    with catalog.write(_TABLE) as session:
        taken = session.scalar(select(KeyRow.id).where(KeyRow.name == name, *_counting(now)))
        if taken is not None:
            raise KeyNameTakenError(
                f"Key {taken} has the name {name!r} already, and the audit log tells callers apart "
                "by name. Choose another, or revoke that key first."
            )
        session.add(row)
    return row, key


def list_keys(catalog: Catalog) -> list[KeyRow]:
    """Return every key, revoked ones too, by name and time of creation."""
    with catalog.read() as session:
        return list(session.scalars(select(KeyRow).order_by(KeyRow.name, KeyRow.created)))


def find_key(catalog: Catalog, identity: str) -> KeyRow | None:
    """Return the key with an id; None: there is none."""
    with catalog.read() as session:
        return session.get(KeyRow, identity)


def revoke_key(catalog: Catalog, identity: str, *, now: datetime) -> KeyRow:
    """Revoke a key for good; leave a revoked key as it is.

    Raises:
        UnknownKeyError: No key has this id.
    """
    with catalog.write(_TABLE) as session:
        row = session.get(KeyRow, identity)
        if row is None:
            raise UnknownKeyError(
                f"There is no key with the id {identity!r}, the twelve characters after "
                f"`{PREFIX}`. `cairn keys list` lists them."
            )
        if row.revoked is None:
            row.revoked = now
        return row


def note_use(catalog: Catalog, identity: str, *, now: datetime) -> None:
    """Record that a key was used."""
    with catalog.write() as session:
        session.execute(update(KeyRow).where(KeyRow.id == identity).values(last_used=now))


def has_valid_key(catalog: Session | Connection, *, now: datetime) -> bool:
    """Return whether at least one key is valid."""
    return catalog.scalar(select(KeyRow.id).where(*_counting(now)).limit(1)) is not None


def counts(row: KeyRow, now: datetime) -> bool:
    """Return whether a key is neither revoked nor expired."""
    return row.revoked is None and (row.expires is None or row.expires > now)


def caller_of(row: KeyRow | None, credential: Credential, now: datetime) -> Caller:
    """Verify a key, and return its caller.

    Args:
        row: Stored row of the key's id; None: there is none.
        credential: Credential that the client sent.
        now: Current time.

    Raises:
        UnauthenticatedError: The key is unknown, revoked or expired.
    """
    # In constant time, and with one error for both: it does not reveal which ids exist.
    if row is None or not compare_digest(row.digest, credential.digest):
        raise UnauthenticatedError(
            "This server does not know the key. `cairn keys create` makes one."
        )
    check_counts(row, now)
    return key_caller(row)


def key_caller(row: KeyRow) -> Caller:
    """Return the caller that a stored key belongs to."""
    roots = None if row.roots is None else frozenset(row.roots)
    return Caller(row.name, Scope(row.scope), roots)


def check_counts(row: KeyRow, now: datetime) -> None:
    """Raise unless a key is valid.

    Raises:
        UnauthenticatedError: The key is revoked or has expired.
    """
    if not counts(row, now):
        ended = f"was revoked at {row.revoked}" if row.revoked else f"expired at {row.expires}"
        raise UnauthenticatedError(
            f"Key {row.id} of {row.name!r} {ended}. `cairn keys create` makes another."
        )


def _counting(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return KeyRow.revoked.is_(None), or_(KeyRow.expires.is_(None), KeyRow.expires > now)
