"""Form routes of webhooks: create, delete, test, redeliver."""

from typing import Final

from fastapi import Request, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import webhooks as webhooks_actions
from cairn.service.dashboard.forms.fields import FormDependency, body_of, redirect
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency
from cairn.service.routes import webhooks
from cairn.service.schemas import WebhookRequest

router: Final = page_router()


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
    new_webhook = webhooks_actions.create_webhook(plane, caller, body)
    return page(request, "administration/new_webhook.html", made=new_webhook)


@router.post("/webhooks/{webhook}/delete")
def delete_webhook_form(
    caller: ServerAdministrator, webhook: webhooks.WebhookId, plane: PlaneDependency
) -> Response:
    """Delete a webhook."""
    webhooks_actions.delete_webhook(plane, caller, webhook)
    return redirect("/webhooks")


@router.post("/webhooks/{webhook}/test")
def send_test_form(
    caller: ServerAdministrator, webhook: webhooks.WebhookId, plane: PlaneDependency
) -> Response:
    """Send a test event to a webhook."""
    webhooks_actions.send_test(plane, caller, webhook)
    return redirect(f"/webhooks/{webhook}")


@router.post("/webhooks/{webhook}/deliveries/{delivery}/redeliver")
def redeliver_form(
    caller: ServerAdministrator,
    webhook: webhooks.WebhookId,
    delivery: webhooks.DeliveryId,
    plane: PlaneDependency,
) -> Response:
    """Try the delivery of an event again."""
    webhooks_actions.redeliver(plane, caller, webhook, delivery)
    return redirect(f"/webhooks/{webhook}")
