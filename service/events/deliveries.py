"""Deliveries of events to webhooks, and their tries.

A webhook has a position in the list of events, and one delivery for each event of its kinds, roots
and runs. For each run, only the earliest pending delivery is tried, so a receiver gets the events
of a run in order.
"""

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Select, func, insert, select, update
from sqlalchemy.orm import Session

from cairn.service.catalog import queries
from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.events.outbox import EventColumns, NewEvent, event_columns, publish
from cairn.service.catalog.models import DeliveryRow, EventRow, WebhookRow
from cairn.service.errors import UnknownDeliveryError
from cairn.service.events.webhooks import require_webhook, wants
from cairn.service.schemas import Delivery, DeliveryState, DeliveryTry, Event, EventKind

AT_ONCE: Final = 500
"""Largest number of events that get their deliveries in one transaction."""

TRIES_KEPT: Final = 20

_PENDING: Final = DeliveryState.PENDING.value
_ADD: Final = insert(DeliveryRow)
_COLUMNS: Final = (
    DeliveryRow.id.label("delivery_id"),
    DeliveryRow.state,
    DeliveryRow.attempts,
    DeliveryRow.due,
    DeliveryRow.log,
)


class Due(NamedTuple):
    """Delivery that is due.

    Attributes:
        id: Number of the delivery.
        attempts: Number of tries so far.
        log: Last tries.
        event: Event to send.
    """

    id: int
    attempts: int
    log: list[dict[str, Any]]
    event: EventColumns


def _of(webhook: str) -> tuple[str, str]:
    """Return the lock (see `Catalog.write`) under which a webhook's deliveries are added."""
    return "", f"webhook {webhook}"


def waiting_webhooks(connection: Connection, now: datetime) -> list[str]:
    """Return the ids of webhooks that have new events, or deliveries that are due."""
    newest = select(func.coalesce(func.max(EventRow.id), 0)).scalar_subquery()
    tried = (
        select(DeliveryRow.id)
        .where(
            DeliveryRow.webhook_id == WebhookRow.id,
            DeliveryRow.state == _PENDING,
            DeliveryRow.due <= now,
        )
        .exists()
    )
    query = select(WebhookRow.id).where((WebhookRow.position < newest) | tried)
    return list(connection.scalars(query))


def take_up(catalog: Catalog, webhook: str, now: datetime) -> None:
    """Add a delivery for each new event that a webhook wants, and move its position past them."""
    while True:
        with catalog.write(_of(webhook)) as session:
            row = session.get(WebhookRow, webhook, with_for_update=True)
            if row is None:
                return
            connection = session.connection()
            events = queries.events(connection, after=row.position, limit=AT_ONCE)
            selected = [event for event in events if wants(row, event)]
            if selected:
                connection.execute(_ADD, [_row(webhook, event, now) for event in selected])
            if events:
                row.position = events[-1].id
        if len(events) < AT_ONCE:
            return


def next_due(connection: Connection, webhook: str, now: datetime) -> Due | None:
    """Return the delivery to try next; None: none is due.

    It is the first pending delivery of its run, and of these the one that is due for the longest
    time.
    """
    first = (
        select(func.min(DeliveryRow.event_id))
        .where(DeliveryRow.webhook_id == webhook, DeliveryRow.state == _PENDING)
        .group_by(DeliveryRow.root, DeliveryRow.run)
    )
    query = (
        _deliveries(webhook)
        .where(
            DeliveryRow.event_id.in_(first), DeliveryRow.state == _PENDING, DeliveryRow.due <= now
        )
        .order_by(DeliveryRow.due, DeliveryRow.event_id)
        .limit(1)
    )
    row = connection.execute(query).first()
    if row is None:
        return None
    return Due(row.delivery_id, row.attempts, row.log, EventColumns._make(row[5:]))


def note_try(
    catalog: Catalog, due: Due, tried: DeliveryTry, *, again: timedelta | None
) -> DeliveryState:
    """Record the outcome of a try, unless a client has requested a redelivery meanwhile.

    Args:
        catalog: Catalog that has the delivery.
        due: Delivery that was tried.
        tried: Outcome of the try.
        again: Time to wait before the next try; None: there is no next try.

    Returns:
        The state of the delivery after this try.
    """
    state = DeliveryState.DELIVERED
    if tried.error is not None:
        state = DeliveryState.DEAD if again is None else DeliveryState.PENDING
    values = {
        "state": state.value,
        "attempts": due.attempts + 1,
        "due": tried.at + (again or timedelta(0)),
        "log": [*due.log, tried.model_dump(mode="json")][-TRIES_KEPT:],
    }
    # A redelivery resets `attempts`, so this compare-and-swap then changes no row.
    seen = (
        DeliveryRow.id == due.id,
        DeliveryRow.state == _PENDING,
        DeliveryRow.attempts == due.attempts,
    )
    with catalog.connect() as connection:
        connection.execute(update(DeliveryRow).where(*seen).values(values))
    return state


def list_deliveries(
    catalog: Catalog,
    webhook: str,
    *,
    before: int | None,
    limit: int,
    state: DeliveryState | None,
) -> list[Delivery]:
    """Return the next deliveries of a webhook, newest first.

    Args:
        catalog: Catalog that has the deliveries.
        webhook: Id of the webhook.
        before: Number of the last delivery that the client has; None: start with the newest.
        limit: Largest number of deliveries to return.
        state: Return only deliveries in this state; None: in any state.

    Raises:
        UnknownWebhookError: No webhook has this id.
    """
    query = _deliveries(webhook)
    if before is not None:
        query = query.where(DeliveryRow.id < before)
    if state is not None:
        query = query.where(DeliveryRow.state == state.value)
    with catalog.read() as session:
        require_webhook(session, webhook)
        rows = session.execute(query.order_by(DeliveryRow.id.desc()).limit(limit)).all()
    return [_body(row) for row in rows]


def redeliver(catalog: Catalog, webhook: str, delivery: int, now: datetime) -> Delivery:
    """Reset a delivery, so that it is tried from now on as if for the first time; return it.

    Raises:
        UnknownWebhookError: No webhook has this id.
        UnknownDeliveryError: The webhook has no such delivery.
    """
    with catalog.write(_of(webhook)) as session:
        require_webhook(session, webhook)
        values = {"state": _PENDING, "attempts": 0, "due": now}
        session.execute(
            update(DeliveryRow)
            .where(DeliveryRow.id == delivery, DeliveryRow.webhook_id == webhook)
            .values(values)
        )
        return _require(session, webhook, delivery)


def send_test(catalog: Catalog, webhook: str, now: datetime) -> Delivery:
    """Publish a test event, add a delivery of it to a webhook, and return the delivery.

    Raises:
        UnknownWebhookError: No webhook has this id.
    """
    key = (secrets.token_hex(8),)
    event = NewEvent(EventKind.WEBHOOK_TEST, "", "", key, {"webhook": webhook})
    with catalog.write(("", "")) as session:
        require_webhook(session, webhook)
        connection = session.connection()
        publish(connection, event)
        # `publish` acquired the lock of event ids, so this is its event.
        newest = connection.scalar(select(func.max(EventRow.id))) or 0
        (stored,) = queries.events(connection, after=newest - 1, limit=1)
        added = connection.execute(_ADD, _row(webhook, stored, now))
        return _require(session, webhook, (added.inserted_primary_key or (0,))[0])


def event_body(event: EventColumns) -> Event:
    """Return an event in the form of the API."""
    return Event.model_validate(event._asdict())


def _row(webhook: str, event: EventColumns, now: datetime) -> dict[str, Any]:
    return {
        "webhook_id": webhook,
        "event_id": event.id,
        "root": event.root,
        "run": event.run,
        "state": _PENDING,
        "attempts": 0,
        "due": now,
        "log": [],
    }


def _deliveries(webhook: str) -> Select[Any]:
    return (
        select(*_COLUMNS, *event_columns)
        .join(EventRow, EventRow.id == DeliveryRow.event_id)
        .where(DeliveryRow.webhook_id == webhook)
    )


def _require(session: Session, webhook: str, delivery: int) -> Delivery:
    row = session.execute(_deliveries(webhook).where(DeliveryRow.id == delivery)).first()
    if row is None:
        raise UnknownDeliveryError(
            f"Webhook {webhook!r} has no delivery {delivery}. "
            f"`cairn webhooks deliveries {webhook}` lists them."
        )
    return _body(row)


def _body(row: Sequence[Any]) -> Delivery:
    number, state, attempts, due, log = row[:5]
    return Delivery(
        id=number,
        state=DeliveryState(state),
        attempts=attempts,
        due=due if state == _PENDING else None,
        tries=[DeliveryTry.model_validate(entry) for entry in log],
        event=event_body(EventColumns._make(row[5:])),
    )
