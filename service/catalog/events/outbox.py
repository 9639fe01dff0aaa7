"""Outbox of events: written in the transaction of the change that they announce.

The events of a run are numbered in the order in which this catalog noticed them. An alias's history
in the store is more complete: a move that went around this server has no event if another move
followed before the next refresh.
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
from cairn.storage.store.clock import from_rfc3339, utc_now

_UID_BYTES: Final = 16
_AT_ONCE: Final = 500  # identities in one statement
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
class NewEvent:
    """Event before it is written.

    Attributes:
        kind: Kind of event.
        root: Name of the root.
        run: Name of the run; "": the event is about the root itself.
        key: Deduplication key: of several events of one kind and run with equal keys, only the
            first is written.
        detail: Content of the event, as JSON.
        when: Time when it happened, if known.
    """

    kind: EventKind
    root: str
    run: str
    key: tuple[str | int | None, ...]
    detail: Mapping[str, Any]
    when: datetime | None = None


class EventColumns(NamedTuple):
    """Columns of a stored event."""

    id: int
    uid: str
    kind: str
    root: str
    run: str
    sequence: int
    detail: dict[str, Any]
    at: datetime


event_columns: Final = tuple(getattr(EventRow, name) for name in EventColumns._fields)


def publish(connection: Connection, event: NewEvent) -> None:
    """Write an event, unless it was written before.

    Args:
        connection: Writing connection that has the run's lock (`Catalog.write`).
        event: Event to write.
    """
    publish_all(connection, event.root, event.run, [event])


def publish_all(connection: Connection, root: str, run: str, events: Iterable[NewEvent]) -> None:
    """Write events of one run in this order, except those that were written before.

    Args:
        connection: Writing connection that has the run's lock (`Catalog.write`).
        root: Name of the root of all events.
        run: Name of the run of all events.
        events: Events to write.
    """
    new_events = {}
    for event in events:
        identity = hashlib.sha256(json.dumps(event.key).encode()).hexdigest()
        new_events[event.kind.value, identity] = event
    place = {"of_root": root, "of_run": run}
    identities = [identity for _, identity in new_events]
    for start in range(0, len(identities), _AT_ONCE):
        parameters = {**place, "identities": identities[start : start + _AT_ONCE]}
        for kind, identity in connection.execute(_KNOWN, parameters):
            new_events.pop((kind, identity), None)
    if not new_events:
        return
    # With this lock, ids grow in the order of commits, so a reader that goes on from an id misses
    # none. Without it, PostgreSQL assigns ids at the insert. No other lock is acquired after this
    # one: no deadlock.
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
            "detail": dict(event.detail),
            "at": now,
        }
        for number, ((kind, identity), event) in enumerate(new_events.items(), 1)
    ]
    connection.execute(_ADD, values)


def last_job_end(connection: Connection) -> datetime | None:
    """Return the time of the last end of a job that was published; None: there is none."""
    ends = select(EventRow.detail).where(EventRow.kind == EventKind.JOB_ENDED.value)
    detail = connection.scalar(ends.order_by(EventRow.id.desc()).limit(1))
    return None if detail is None else from_rfc3339(detail["ended"])
