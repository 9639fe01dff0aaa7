"""Actions on webhooks.

Callers that are limited to some roots may not create webhooks: those could leak events of others.
"""

from datetime import UTC, datetime

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog.models import WebhookRow
from cairn.service.errors import InvalidRequestError
from cairn.service.events import deliveries, targets, webhooks
from cairn.service.schemas import Delivery, DeliveryState, NewWebhook, Webhook, WebhookRequest


def list_webhooks(plane: ControlPlane) -> list[Webhook]:
    """Return all webhooks, without secrets."""
    counted = webhooks.count_deliveries(plane.catalog)
    return [
        _body(
            row,
            pending=counted.get((row.id, DeliveryState.PENDING), 0),
            dead=counted.get((row.id, DeliveryState.DEAD), 0),
        )
        for row in webhooks.list_webhooks(plane.catalog)
    ]


def create_webhook(plane: ControlPlane, caller: Caller, request: WebhookRequest) -> NewWebhook:
    """Create a webhook for the events from now on.

    Raises:
        TargetRefusedError: The URL is not allowed.
        InvalidRequestError: A root is unknown.
    """
    targets.parse_target(request.url, plane.settings.networks)
    unknown = [root for root in request.roots or () if root not in plane.roots]
    if unknown:
        text = f"there is no root {', '.join(map(repr, unknown))}. "
        text += f"Choose from {', '.join(plane.roots)}."
        raise InvalidRequestError(
            f"body.roots: {text}", errors=[{"field": "body.roots", "detail": text}]
        )
    detail = request.model_dump(mode="json")
    with audited(plane, caller, "webhook.create", **detail) as entry:
        row = webhooks.make_webhook(plane.catalog, request, by=caller.name, now=datetime.now(UTC))
        entry.complete(id=row.id)
    return NewWebhook(secret=row.secret, details=_body(row))


def delete_webhook(plane: ControlPlane, caller: Caller, webhook: str) -> None:
    """Delete a webhook, with its deliveries.

    Raises:
        UnknownWebhookError: No webhook has this id.
    """
    with audited(plane, caller, "webhook.delete", id=webhook):
        webhooks.delete_webhook(plane.catalog, webhook)


def list_deliveries(
    plane: ControlPlane,
    webhook: str,
    *,
    before: int | None,
    limit: int,
    state: DeliveryState | None,
) -> tuple[list[Delivery], bool]:
    """Return the next deliveries of a webhook, newest first, and whether there are more.

    Args:
        plane: The control plane.
        webhook: Id of the webhook.
        before: Number of the last delivery that the client has; None: start with the newest.
        limit: Largest number of deliveries.
        state: Return only deliveries in this state; None: in any.

    Raises:
        UnknownWebhookError: No webhook has this id.
    """
    page = deliveries.list_deliveries(
        plane.catalog, webhook, before=before, limit=limit + 1, state=state
    )
    return page[:limit], len(page) > limit


def redeliver(plane: ControlPlane, caller: Caller, webhook: str, delivery: int) -> Delivery:
    """Reset a delivery, so that it is tried again, whatever its state.

    Raises:
        UnknownWebhookError, UnknownDeliveryError: There is no such webhook or delivery.
    """
    with audited(plane, caller, "webhook.redeliver", id=webhook, delivery=delivery):
        return deliveries.redeliver(plane.catalog, webhook, delivery, datetime.now(UTC))


def send_test(plane: ControlPlane, caller: Caller, webhook: str) -> Delivery:
    """Send a test event to one webhook.

    Raises:
        UnknownWebhookError: No webhook has this id.
    """
    with audited(plane, caller, "webhook.test", id=webhook):
        return deliveries.send_test(plane.catalog, webhook, datetime.now(UTC))


def _body(row: WebhookRow, *, pending: int = 0, dead: int = 0) -> Webhook:
    return Webhook(
        id=row.id,
        url=row.url,
        kinds=row.kinds,
        roots=row.roots,
        runs=row.runs,
        created=row.created,
        created_by=row.created_by,
        pending=pending,
        dead=dead,
    )
