"""Keys of callers, `ck_<id>_<secret>`: made, told apart, revoked. Only a digest of one is kept."""

import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from hmac import compare_digest
from typing import Final

from sqlalchemy import ColumnElement, or_, select, update

from cairn.service.access.callers import Caller, Scope
from cairn.service.catalog import Catalog, KeyRow
from cairn.service.errors import KeyNameTakenError, UnauthenticatedError, UnknownKeyError

PREFIX: Final = "ck_"
_ID_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz234567"
_ID_LENGTH: Final = 12
_SECRET_BYTES: Final = 32
_KEY: Final = re.compile(r"ck_([a-z2-7]{12})_[A-Za-z0-9_-]{43}")
_TABLE: Final = ("", "keys")
"""Of the lock under which keys are written."""


@dataclass(frozen=True)
class Credential:
    """What a key says of itself; nothing here gives the key away.

    Attributes:
        id: Which key it is.
        digest: SHA-256 of the whole key, in hex.
    """

    id: str
    digest: str

    @classmethod
    def parse(cls, text: str) -> "Credential | None":
        """Read a key; None: it has not the form of one."""
        found = _KEY.fullmatch(text)
        return None if found is None else cls(found[1], digest_of(text))


def digest_of(secret: str) -> str:
    """What is kept of a secret with more entropy than anybody can try out: its SHA-256, in hex."""
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
    """Make a key; it is told now or never.

    Args:
        catalog: Where it is noted.
        name: Of its caller, for the audit trail.
        scope: What they may do.
        roots: Where they may; None: in all roots.
        expires: When it stops to count; None: never.
        by: Who makes it.
        now: When.

    Raises:
        KeyNameTakenError: Another key that counts has the name.
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
                f"key {name!r}: expected a name that no key has, as the audit trail tells callers "
                f"apart by it; found key {taken}. Choose another, or revoke that one first."
            )
        session.add(row)
    return row, key


def list_keys(catalog: Catalog) -> list[KeyRow]:
    """Every key that was made, by name and time."""
    with catalog.read() as session:
        return list(session.scalars(select(KeyRow).order_by(KeyRow.name, KeyRow.created)))


def find_key(catalog: Catalog, identity: str) -> KeyRow | None:
    """The key of an id."""
    with catalog.read() as session:
        return session.get(KeyRow, identity)


def revoke_key(catalog: Catalog, identity: str, *, now: datetime) -> KeyRow:
    """Have a key count no more, for good; one that was revoked stays as it is.

    Raises:
        UnknownKeyError: There is none.
    """
    with catalog.write(_TABLE) as session:
        row = session.get(KeyRow, identity)
        if row is None:
            raise UnknownKeyError(
                f"key {identity!r}: expected the id of one, the twelve characters after "
                f"`{PREFIX}`, found none of that id. `cairn keys list` tells them."
            )
        if row.revoked is None:
            row.revoked = now
        return row


def note_use(catalog: Catalog, identity: str, *, now: datetime) -> None:
    """Note that a key was used."""
    with catalog.write() as session:
        session.execute(update(KeyRow).where(KeyRow.id == identity).values(last_used=now))


def some_key_counts(catalog: Catalog, *, now: datetime) -> bool:
    """Whether anybody has a key."""
    with catalog.read() as session:
        return session.scalar(select(KeyRow.id).where(*_counting(now)).limit(1)) is not None


def counts(row: KeyRow, now: datetime) -> bool:
    """Whether a key is neither revoked nor expired."""
    return row.revoked is None and (row.expires is None or row.expires > now)


def caller_of(row: KeyRow | None, credential: Credential, now: datetime) -> Caller:
    """Who shows a key.

    Args:
        row: What is kept of the key of that id, if there is one.
        credential: What was shown.
        now: When.

    Raises:
        UnauthenticatedError: It is none of ours, or counts no more.
    """
    if row is None or not compare_digest(row.digest, credential.digest):
        raise UnauthenticatedError(
            "expected a key that this server knows, found another. `cairn keys create` makes one."
        )
    check_counts(row, now)
    return key_caller(row)


def key_caller(row: KeyRow) -> Caller:
    """Whose key it is."""
    roots = None if row.roots is None else frozenset(row.roots)
    return Caller(row.name, Scope(row.scope), roots)


def check_counts(row: KeyRow, now: datetime) -> None:
    """Pass a key that counts.

    Raises:
        UnauthenticatedError: It is revoked or has expired.
    """
    if not counts(row, now):
        ended = f"was revoked at {row.revoked}" if row.revoked else f"expired at {row.expires}"
        raise UnauthenticatedError(
            f"key {row.id} of {row.name!r}: expected one that counts, found one that {ended}. "
            "`cairn keys create` makes another."
        )


def _counting(now: datetime) -> tuple[ColumnElement[bool], ...]:
    return KeyRow.revoked.is_(None), or_(KeyRow.expires.is_(None), KeyRow.expires > now)
