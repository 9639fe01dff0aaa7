"""Pruning of old events and their deliveries, once no webhook or automation needs them."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import Connection, and_, delete, func, insert, not_, or_, select, update
from sqlalchemy.orm import aliased

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.events.outbox import last_job_end
from cairn.service.catalog.models import AutomationRow, DeliveryRow, EventRow, PrunedRow, WebhookRow
from cairn.service.schemas import DeliveryState, EventKind

AT_ONCE: Final = 500
"""Events that are removed in one transaction."""

OVERLAP: Final = timedelta(minutes=30)
"""Time before the last published end of a job from which ended jobs are searched again."""

_EVENTS: Final = EventRow.__tablename__
_JOBS: Final = (EventKind.JOB_ENDED.value, EventKind.VERIFY_FAILED.value)


def prune_events(catalog: Catalog, before: datetime, automations: Iterable[str]) -> int:
    """Remove a batch of events that are older than a moment, and return their number.

    Some old events stay: the last one of each run, since the next number follows it; those that
    prove which ends of jobs were published; those that a webhook has not read or delivered; and
    those that an automation still has to read.

    Args:
        catalog: Catalog with the events.
        before: The moment.
        automations: Names of the environment's automations. Those of roots are needed as long as
            they have a row; see `forget`.
    """
    with catalog.connect() as connection:
        last = min([_last_old(connection, before), *_needed_positions(connection, automations)])
        later = aliased(EventRow)
        of_run = later.root == EventRow.root, later.run == EventRow.run
        followed = select(later.id).where(*of_run, later.sequence > EventRow.sequence).exists()
        old = select(EventRow.id).where(EventRow.id <= last, followed)
        last_end = last_job_end(connection)
        if last_end is not None:  # ended jobs are searched again from then on
            searched = and_(EventRow.kind.in_(_JOBS), EventRow.at >= last_end - OVERLAP)
            old = old.where(not_(searched))
        ids = list(connection.scalars(old.order_by(EventRow.id).limit(AT_ONCE)))
        if not ids:
            return 0
        done = DeliveryRow.event_id.in_(ids), DeliveryRow.state != DeliveryState.PENDING.value
        connection.execute(delete(DeliveryRow).where(*done))
        has_delivery = select(DeliveryRow.id).where(DeliveryRow.event_id == EventRow.id).exists()
        removed = connection.execute(
            delete(EventRow).where(EventRow.id.in_(ids), not_(has_delivery))
        )
        position = max(ids[-1], pruned_events(connection))
        moved = update(PrunedRow).where(PrunedRow.name == _EVENTS).values(position=position)
        if not connection.execute(moved).rowcount:
            connection.execute(insert(PrunedRow).values(name=_EVENTS, position=position))
        return removed.rowcount


def pruned_events(connection: Connection) -> int:
    """Return the id of the last removed event; 0: none was removed.

    A few earlier events may be left.
    """
    query = select(PrunedRow.position).where(PrunedRow.name == _EVENTS)
    return connection.scalar(query) or 0


def _last_old(connection: Connection, before: datetime) -> int:
    """Return the highest id up to which all events are older than a moment; 0: there is none."""
    recent = select(EventRow.id).where(EventRow.at >= before).order_by(EventRow.id).limit(1)
    first = connection.scalar(recent)
    if first is not None:
        return int(first) - 1
    return connection.scalar(select(func.coalesce(func.max(EventRow.id), 0))) or 0


def _needed_positions(connection: Connection, automations: Iterable[str]) -> list[int]:
    """Return the ids up to which webhooks, pending deliveries or automations need no events."""
    pending = DeliveryRow.state == DeliveryState.PENDING.value
    bounds = [
        connection.scalar(select(func.min(WebhookRow.position))),
        connection.scalar(select(func.min(DeliveryRow.event_id) - 1).where(pending)),
    ]
    # A new automation has no row: it starts at the newest event.
    needed = or_(AutomationRow.name.in_(list(automations)), AutomationRow.name.contains("/"))
    for followed in connection.scalars(select(AutomationRow.position).where(needed)).all():
        moved = EventRow.kind == EventKind.ALIAS_MOVED.value, EventRow.id > followed
        bounds.append(connection.scalar(select(func.min(EventRow.id) - 1).where(*moved)))
    return [bound for bound in bounds if bound is not None]
