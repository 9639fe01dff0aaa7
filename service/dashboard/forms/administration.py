"""Form routes for administrators: keys, webhooks, roots, dead workers."""

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import keys as keys_actions
from cairn.service.actions import roots, workers
from cairn.service.actions import webhooks as webhooks_actions
from cairn.service.dashboard.forms.fields import FormDependency, body_of
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.routes import keys, webhooks
from cairn.service.schemas import AddRootRequest, KeyRequest, WebhookRequest

_DAY: Final = 86_400.0

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=CatalogPage
)


@router.post("/keys")
def create_key_form(
    request: Request, caller: ServerAdministrator, plane: PlaneDependency, form: FormDependency
) -> HTMLResponse:
    """Create a key, and show it once."""
    days = form.decimal("expires_days")
    body = body_of(
        KeyRequest,
        name=form.text("name"),
        scope=form.text("scope") or "read",
        roots=form.texts("roots") or None,
        expires_seconds=None if days is None else days * _DAY,
    )
    new_key = keys_actions.create_key(plane, caller, body)
    return page(request, "administration/new_key.html", made=new_key)


@router.post("/keys/{key}/revoke")
def revoke_key_form(
    caller: ServerAdministrator, key: keys.KeyId, plane: PlaneDependency
) -> Response:
    """Revoke a key."""
    keys_actions.revoke_key(plane, caller, key)
    return _to("/keys")


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
    return _to("/webhooks")


@router.post("/webhooks/{webhook}/test")
def send_test_form(
    caller: ServerAdministrator, webhook: webhooks.WebhookId, plane: PlaneDependency
) -> Response:
    """Send a test event to a webhook."""
    webhooks_actions.send_test(plane, caller, webhook)
    return _to(f"/webhooks/{webhook}")


@router.post("/webhooks/{webhook}/deliveries/{delivery}/redeliver")
def redeliver_form(
    caller: ServerAdministrator,
    webhook: webhooks.WebhookId,
    delivery: webhooks.DeliveryId,
    plane: PlaneDependency,
) -> Response:
    """Try the delivery of an event again."""
    webhooks_actions.redeliver(plane, caller, webhook, delivery)
    return _to(f"/webhooks/{webhook}")


@router.post("/health/roots")
def add_root_form(
    caller: ServerAdministrator, plane: PlaneDependency, form: FormDependency
) -> Response:
    """Add a root while the server runs."""
    body = body_of(AddRootRequest, name=form.text("name"), uri=form.text("uri"))
    roots.add_root(plane, caller, body.name, body.uri)
    return _to("/health")


def remove_root_form(
    caller: ServerAdministrator, root: RootName, plane: PlaneDependency
) -> Response:
    """Remove an added root from service. Its store stays as it is."""
    roots.remove_root(plane, caller, root)
    return _to("/health")


router.add_api_route(
    "/health/roots/{root}/remove",
    remove_root_form,
    methods=["POST"],
    route_class_override=PermittedRoute,  # without a limiter: a root of a dead store can go, too
)


@router.post("/workers/{worker}/take-over")
def take_over_form(
    caller: ServerAdministrator,
    worker: Annotated[str, Path(max_length=128)],
    plane: PlaneDependency,
) -> Response:
    """Hand the unfinished jobs of a dead worker over to other workers."""
    workers.take_over_worker(plane, caller, worker)
    return _to("/operations")


def _to(path: str) -> Response:
    return Response(status_code=HTTPStatus.OK, headers={"HX-Redirect": path})
