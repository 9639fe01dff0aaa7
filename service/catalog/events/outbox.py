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
_AT_ONCE: Final = 500  # named in one statement
_LAST: Final = select(func.coalesce(func.max(EventRow.sequence), 0)).where(
    EventRow.root == bindparam("of_root"), EventRow.run == bindparam("of_run")
)
_KNOWN: Final = select(EventRow.kind, EventRow.identity).where(
    EventRow.root == bindparam("of_root"),
    EventRow.run == bindparam("of_run"),
    EventRow.identity.in_(bindparam("identities", expanding=True)),
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


def tell(connection: Connection, happening: Happening) -> None:
    """Write an event, unless it is there.

    Args:
        connection: For writing, with its run's lock (`Catalog.write`).
        happening: What happened.
    """
    tell_all(connection, happening.root, happening.run, [happening])


def tell_all(connection: Connection, root: str, run: str, happenings: Iterable[Happening]) -> None:
    """Write events of one run, in this order; those that are there are left out.

    Args:
        connection: For writing, with the run's lock (`Catalog.write`).
        root: Name of the root of all.
        run: Name of the run of all.
        happenings: What happened.
    """
    told = {(one.kind.value, _identity(one.key)): one for one in happenings}
    place = {"of_root": root, "of_run": run}
    identities = [identity for _, identity in told]
    for start in range(0, len(identities), _AT_ONCE):
        asked = {**place, "identities": identities[start : start + _AT_ONCE]}
        for kind, identity in connection.execute(_KNOWN, asked):
            told.pop((kind, identity), None)
    if not told:
        return
    # Ids are given in the order of commits: whoever reads on from one misses none (PostgreSQL gives
    # them at the insert). Nothing else is locked after this.
    lock(connection, "cairn events")
    last, now = connection.scalar(_LAST, place) or 0, utc_now()
    values = [
        {
            "uid": f"evt_{secrets.token_hex(_UID_BYTES)}",
            "kind": kind,
            "root": root,
            "run": run,
            "sequence": last + number,
            "identity": identity,
            "detail": dict(one.detail),
            "at": now,
        }
        for number, ((kind, identity), one) in enumerate(told.items(), 1)
    ]
    connection.execute(_ADD, values)


def _identity(key: tuple[str | int | None, ...]) -> str:
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()
