"""Actions on keys.

Callers that are limited to some roots may not create keys: a key may give access to other roots.
"""

from datetime import UTC, datetime, timedelta
from typing import Final

from cairn.service.access import keys
from cairn.service.access.callers import Caller, Scope
from cairn.service.actions.audit import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.models import KeyRow
from cairn.service.errors import KeyNameTakenError, UnknownRootError
from cairn.service.schemas import Key, KeyRequest, NewKey

RESERVED: Final = frozenset({"loopback"})
"""Names of callers without a key, in the audit trail."""


def list_keys(plane: ControlPlane) -> list[Key]:
    """Return every key, revoked ones too, by name and time of creation."""
    return [_body(row) for row in keys.list_keys(plane.catalog)]


def create_key(plane: ControlPlane, caller: Caller, request: KeyRequest) -> NewKey:
    """Create a key.

    Raises:
        UnknownRootError: A root is unknown.
        KeyNameTakenError: A valid key has the name.
    """
    unknown = [root for root in request.roots or () if root not in plane.roots]
    if unknown:
        raise UnknownRootError(
            f"roots: there is no root {', '.join(map(repr, unknown))}. Choose from "
            f"{', '.join(plane.roots)}."
        )
    if request.name in RESERVED:
        raise KeyNameTakenError(
            f"The name {request.name!r} is reserved for callers without a key. Choose another."
        )
    now = datetime.now(UTC)
    seconds = request.expires_seconds
    detail = request.model_dump(mode="json")
    with audited(plane, caller, "key.create", **detail) as entry:
        row, key = keys.make_key(
            plane.catalog,
            name=request.name,
            scope=request.scope,
            roots=request.roots,
            expires=None if seconds is None else now + timedelta(seconds=seconds),
            by=caller.name,
            now=now,
        )
        entry.complete(id=row.id)
    return NewKey(key=key, details=_body(row))


def revoke_key(plane: ControlPlane, caller: Caller, key: str) -> Key:
    """Revoke a key.

    Raises:
        UnknownKeyError: No key has this id.
    """
    with audited(plane, caller, "key.revoke", id=key):
        return _body(keys.revoke_key(plane.catalog, key, now=datetime.now(UTC)))


def _body(row: KeyRow) -> Key:
    return Key(
        id=row.id,
        name=row.name,
        scope=Scope(row.scope),
        roots=row.roots,
        counts=keys.counts(row, datetime.now(UTC)),
        created=row.created,
        created_by=row.created_by,
        expires=row.expires,
        revoked=row.revoked,
        last_used=row.last_used,
    )
