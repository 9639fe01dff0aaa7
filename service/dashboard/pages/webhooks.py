"""Pages of webhooks: `/webhooks`, `/webhooks/{webhook}`."""

from typing import Annotated, Final

from fastapi import Query, Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import webhooks as webhooks_actions
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PageToken, PlaneDependency
from cairn.service.errors import UnknownWebhookError
from cairn.service.routes import webhooks
from cairn.service.schemas import DeliveryState, EventKind

ROWS: Final = 50

router: Final = page_router()


@router.get("/webhooks")
def webhooks_page(
    request: Request, caller: ServerAdministrator, plane: PlaneDependency
) -> HTMLResponse:
    """Show the webhooks."""
    return page(
        request,
        "administration/webhooks.html",
        webhooks=webhooks_actions.list_webhooks(plane),
        kinds=[kind.value for kind in EventKind if kind is not EventKind.WEBHOOK_TEST],
        roots=list(plane.roots),
    )


@router.get("/webhooks/{webhook}")
def webhook_page(
    request: Request,
    caller: ServerAdministrator,
    webhook: webhooks.WebhookId,
    plane: PlaneDependency,
    state: Annotated[str, Query(max_length=16)] = "",
    page_token: PageToken = None,
) -> HTMLResponse:
    """Show a webhook and its deliveries."""
    delivery_state = DeliveryState(state) if state in list(DeliveryState) else None
    deliveries = webhooks.list_deliveries(caller, webhook, plane, delivery_state, ROWS, page_token)
    rows = [row for row in webhooks_actions.list_webhooks(plane) if row.id == webhook]
    if not rows:
        raise UnknownWebhookError(f"There is no webhook {webhook!r}.")
    return page(
        request,
        "administration/webhook.html",
        webhook=rows[0],
        deliveries=deliveries.deliveries,
        next_page_token=deliveries.next_page_token,
        state=delivery_state,
        states=list(DeliveryState),
    )
