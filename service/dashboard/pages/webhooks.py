"""Webhooks, to see, create, delete and test: `/webhooks`, `/webhooks/{webhook}`."""

from typing import Annotated, Final

from fastapi import Query, Request, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import webhooks
from cairn.service.dashboard.form_fields import FormDependency, body_of, redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PageToken, PlaneDependency
from cairn.service.errors import UnknownWebhookError
from cairn.service.routes.webhooks import DeliveryId, WebhookId, list_deliveries
from cairn.service.schemas import DeliveryState, EventKind, WebhookRequest

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
        webhooks=webhooks.list_webhooks(plane),
        kinds=[kind.value for kind in EventKind if kind is not EventKind.WEBHOOK_TEST],
        roots=list(plane.roots),
    )


@router.get("/webhooks/{webhook}")
def webhook_page(
    request: Request,
    caller: ServerAdministrator,
    webhook: WebhookId,
    plane: PlaneDependency,
    state: Annotated[str, Query(max_length=16)] = "",
    page_token: PageToken = None,
) -> HTMLResponse:
    """Show a webhook and its deliveries."""
    delivery_state = DeliveryState(state) if state in list(DeliveryState) else None
    deliveries = list_deliveries(caller, webhook, plane, delivery_state, ROWS, page_token)
    rows = [row for row in webhooks.list_webhooks(plane) if row.id == webhook]
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


@router.post("/webhooks")
def create_webhook_form(
    request: Request, caller: ServerAdministrator, plane: PlaneDependency, form: FormDependency
) -> HTMLResponse:
    """Create a webhook, and show its secret once."""
    body = body_of(
        WebhookRequest,
        url=form.text("url"),
        kinds=form.texts("kinds") or None,
        roots=form.texts("roots") or None,
        runs=form.text("runs") or "*",
    )
    new_webhook = webhooks.create_webhook(plane, caller, body)
    return page(request, "administration/new_webhook.html", made=new_webhook)


@router.post("/webhooks/{webhook}/delete")
def delete_webhook_form(
    caller: ServerAdministrator, webhook: WebhookId, plane: PlaneDependency
) -> Response:
    """Delete a webhook."""
    webhooks.delete_webhook(plane, caller, webhook)
    return redirect("/webhooks")


@router.post("/webhooks/{webhook}/test")
def send_test_form(
    caller: ServerAdministrator, webhook: WebhookId, plane: PlaneDependency
) -> Response:
    """Send a test event to a webhook."""
    webhooks.send_test(plane, caller, webhook)
    return redirect(f"/webhooks/{webhook}")


@router.post("/webhooks/{webhook}/deliveries/{delivery}/redeliver")
def redeliver_form(
    caller: ServerAdministrator,
    webhook: WebhookId,
    delivery: DeliveryId,
    plane: PlaneDependency,
) -> Response:
    """Try the delivery of an event again."""
    webhooks.redeliver(plane, caller, webhook, delivery)
    return redirect(f"/webhooks/{webhook}")
