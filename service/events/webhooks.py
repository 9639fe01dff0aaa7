"""Webhooks, the receivers of events: create, list, delete."""

import fnmatch
import secrets
from collections.abc import Mapping
from datetime import datetime
from typing import Final

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from cairn.service.catalog.engine import Catalog
from cairn.service.catalog.events.outbox import EventColumns
from cairn.service.catalog.models import DeliveryRow, EventRow, WebhookRow
from cairn.service.errors import UnknownWebhookError
from cairn.service.events.signatures import make_secret
from cairn.service.schemas import DeliveryState, EventKind, WebhookRequest

TABLE: Final = ("", "webhooks")
"""Root and run of the lock for changes of webhooks; see `Catalog.write`."""

_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz234567"
_LENGTH: Final = 12


def make_webhook(
    catalog: Catalog, request: WebhookRequest, *, by: str, now: datetime
) -> WebhookRow:
    """Create a webhook for the events from now on."""
    with catalog.write(TABLE) as session:
        row = WebhookRow(
            id="".join(secrets.choice(_LETTERS) for _ in range(_LENGTH)),
            url=request.url,
            secret=make_secret(),
            kinds=None if request.kinds is None else sorted({*request.kinds}),
            roots=None if request.roots is None else sorted({*request.roots}),
            runs=request.runs,
            created=now,
            created_by=by,
            position=session.scalar(select(func.coalesce(func.max(EventRow.id), 0))) or 0,
        )
        session.add(row)
    return row


def list_webhooks(catalog: Catalog) -> list[WebhookRow]:
    """Return all webhooks, by time of creation."""
    with catalog.read() as session:
        return list(session.scalars(select(WebhookRow).order_by(WebhookRow.created, WebhookRow.id)))


def require_webhook(session: Session, webhook: str) -> WebhookRow:
    """Return the webhook with an id.

    Raises:
        UnknownWebhookError: No webhook has this id.
    """
    row = session.get(WebhookRow, webhook)
    if row is None:
        raise UnknownWebhookError(
            f"There is no webhook {webhook!r}. `cairn webhooks list` lists them."
        )
    return row


def delete_webhook(catalog: Catalog, webhook: str) -> None:
    """Delete a webhook, with its deliveries.

    Raises:
        UnknownWebhookError: No webhook has this id.
    """
    with catalog.write(TABLE) as session:
        session.delete(require_webhook(session, webhook))


def count_deliveries(catalog: Catalog) -> Mapping[tuple[str, DeliveryState], int]:
    """Count the deliveries, by webhook and state."""
    query = select(DeliveryRow.webhook_id, DeliveryRow.state, func.count()).group_by(
        DeliveryRow.webhook_id, DeliveryRow.state
    )
    with catalog.query() as connection:
        return {
            (webhook, DeliveryState(state)): n for webhook, state, n in connection.execute(query)
        }


def count_dead(catalog: Catalog) -> int:
    """Count the deliveries that were given up, and that no client has requested again."""
    query = select(func.count()).where(DeliveryRow.state == DeliveryState.DEAD.value)
    with catalog.query() as connection:
        return connection.scalar(query) or 0


def waiting_since(catalog: Catalog) -> datetime | None:
    """Return the time of the oldest event that a webhook has not received; None: there is none.

    Events for which a webhook has no deliveries yet are included, even if it does not want them.
    """
    pending = select(DeliveryRow.event_id).where(DeliveryRow.state == DeliveryState.PENDING.value)
    seen = select(func.min(WebhookRow.position)).scalar_subquery()
    with catalog.query() as connection:
        moments = [
            connection.scalar(select(func.min(EventRow.at)).where(which))
            for which in (EventRow.id.in_(pending), EventRow.id > seen)
        ]
    return min((moment for moment in moments if moment is not None), default=None)


def wants(webhook: WebhookRow, event: EventColumns) -> bool:
    """Return whether an event is one that a webhook has asked for.

    False for test events: only the tested webhook gets them, by `send_test`.
    """
    return (
        event.kind != EventKind.WEBHOOK_TEST
        and (webhook.kinds is None or event.kind in webhook.kinds)
        and (webhook.roots is None or event.root in webhook.roots)
        and fnmatch.fnmatchcase(event.run, webhook.runs)
    )
