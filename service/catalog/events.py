"""What happened, for who wants to be told: written in the transaction that makes it so here.

Of each run the events are numbered in the order in which this catalog came to know of them. Where
an alias pointed, its history in the store knows better: of what went around and was overtaken
before anybody looked there is no event.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, bindparam, func, insert, select

from cairn.service.catalog.engine import lock
from cairn.service.catalog.models import EventRow
from cairn.service.schemas import EventKind
from cairn.storage.store import utc_now

_UID_BYTES: Final = 16
_LAST: Final = select(func.coalesce(func.max(EventRow.sequence), 0)).where(
    EventRow.root == bindparam("of_root"), EventRow.run == bindparam("of_run")
)
_SAME: Final = select(EventRow.id).where(
    EventRow.root == bindparam("of_root"),
    EventRow.run == bindparam("of_run"),
    EventRow.kind == bindparam("of_kind"),
    EventRow.identity == bindparam("of_identity"),
)
_ADD: Final = insert(EventRow)


@dataclass(frozen=True)
class Happening:
    """Something that happened.

    Attributes:
        kind: What.
        root: Name of the root.
        run: Name of the run; "": it is of the root itself.
        key: What tells it from others of its kind and run: the same one is told once.
        detail: What there is to say of it, as JSON.
        when: When it happened, as far as that is known.
    """

    kind: EventKind
    root: str
    run: str
    key: tuple[str | int | None, ...]
    detail: Mapping[str, Any]
    when: datetime | None = None


class EventColumns(NamedTuple):
    """An event as the catalog has it."""

    id: int
    uid: str
    kind: str
    root: str
    run: str
    sequence: int
    detail: dict[str, Any]
    at: datetime


event_columns: Final = tuple(getattr(EventRow, name) for name in EventColumns._fields)


def tell(connection: Connection, happening: Happening) -> int | None:
    """Write an event, unless it is there; its id.

    Args:
        connection: For writing, with its run's lock (`Catalog.write`).
        happening: What happened.
    """
    identity = _identity(happening.key)
    place = {"of_root": happening.root, "of_run": happening.run}
    asked = {**place, "of_kind": happening.kind.value}
    if connection.execute(_SAME, {**asked, "of_identity": identity}).first() is not None:
        return None
    # Ids are given in the order of commits: whoever reads on from one misses none (PostgreSQL gives
    # them at the insert). Nothing else is locked after this.
    lock(connection, "cairn events")
    values = {
        "uid": f"evt_{secrets.token_hex(_UID_BYTES)}",
        "kind": happening.kind.value,
        "root": happening.root,
        "run": happening.run,
        "sequence": (connection.scalar(_LAST, place) or 0) + 1,
        "identity": identity,
        "detail": dict(happening.detail),
        "at": utc_now(),
    }
    (row,) = connection.execute(_ADD, values).inserted_primary_key or (None,)
    return row


def tell_all(connection: Connection, happenings: Iterable[Happening]) -> None:
    """As `tell`, in this order."""
    for one in happenings:
        tell(connection, one)


def _identity(key: tuple[str | int | None, ...]) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()
