"""Form routes for administrators: keys, webhooks, roots, dead workers."""

from http import HTTPStatus
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import ServerAdministrator
from cairn.service.dashboard.forms import FormDependency, body_of
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName
from cairn.service.http import PermittedRoute
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
    wanted = body_of(
        KeyRequest,
        name=form.text("name"),
        scope=form.text("scope") or "read",
        roots=form.texts("roots") or None,
        expires_seconds=None if days is None else days * _DAY,
    )
    made = actions.create_key(plane, caller, wanted)
    return page(request, "administration/new_key.html", made=made)


@router.post("/keys/{key}/revoke")
def revoke_key_form(
    caller: ServerAdministrator, key: keys.KeyId, plane: PlaneDependency
) -> Response:
    """Revoke a key."""
    actions.revoke_key(plane, caller, key)
    return _to("/keys")


@router.post("/webhooks")
def create_webhook_form(
    request: Request, caller: ServerAdministrator, plane: PlaneDependency, form: FormDependency
) -> HTMLResponse:
    """Create a webhook, and show its secret once."""
    wanted = body_of(
        WebhookRequest,
        url=form.text("url"),
        kinds=form.texts("kinds") or None,
        roots=form.texts("roots") or None,
        runs=form.text("runs") or "*",
    )
    made = actions.create_webhook(plane, caller, wanted)
    return page(request, "administration/new_webhook.html", made=made)


@router.post("/webhooks/{webhook}/delete")
def delete_webhook_form(
    caller: ServerAdministrator, webhook: webhooks.WebhookId, plane: PlaneDependency
) -> Response:
    """Delete a webhook."""
    actions.delete_webhook(plane, caller, webhook)
    return _to("/webhooks")


@router.post("/webhooks/{webhook}/test")
def send_test_form(
    caller: ServerAdministrator, webhook: webhooks.WebhookId, plane: PlaneDependency
) -> Response:
    """Send a test event to a webhook."""
    actions.send_test(plane, caller, webhook)
    return _to(f"/webhooks/{webhook}")


@router.post("/webhooks/{webhook}/deliveries/{delivery}/redeliver")
def redeliver_form(
    caller: ServerAdministrator,
    webhook: webhooks.WebhookId,
    delivery: webhooks.DeliveryId,
    plane: PlaneDependency,
) -> Response:
    """Try the delivery of an event again."""
    actions.redeliver(plane, caller, webhook, delivery)
    return _to(f"/webhooks/{webhook}")


@router.post("/health/roots")
def add_root_form(
    caller: ServerAdministrator, plane: PlaneDependency, form: FormDependency
) -> Response:
    """Add a root while the server runs."""
    wanted = body_of(AddRootRequest, name=form.text("name"), uri=form.text("uri"))
    actions.add_root(plane, caller, wanted.name, wanted.uri)
    return _to("/health")


def remove_root_form(
    caller: ServerAdministrator, root: RootName, plane: PlaneDependency
) -> Response:
    """Remove an added root from service. Its store stays as it is."""
    actions.remove_root(plane, caller, root)
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
    actions.take_over_worker(plane, caller, worker)
    return _to("/operations")


def _to(path: str) -> Response:
    return Response(status_code=HTTPStatus.OK, headers={"HX-Redirect": path})
