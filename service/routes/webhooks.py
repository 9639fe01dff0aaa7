"""Webhooks, and the deliveries of events to them."""

from typing import Annotated, Final

from fastapi import APIRouter, Path, Query, Response

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import webhooks
from cairn.service.dependencies import PageSize, PageToken, PlaneDependency
from cairn.service.http.paging import decode_token, encode_token
from cairn.service.http.path_names import named
from cairn.service.http.permitted_routes import PermittedRoute
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import (
    ID_PATTERN,
    MAX_NUMBER,
    Delivery,
    DeliveryList,
    DeliveryState,
    NewWebhook,
    WebhookList,
    WebhookRequest,
)

router: Final = APIRouter(prefix="/webhooks", tags=["events"], route_class=PermittedRoute)

WebhookId = Annotated[str, Path(pattern=ID_PATTERN, description="Id of a webhook.")]
DeliveryId = Annotated[int, Path(ge=1, le=MAX_NUMBER, description="Number of a delivery.")]
StateFilter = Annotated[
    DeliveryState | None, Query(description="Deliveries in this state only; default: all.")
]


@router.get("")
def list_webhooks(caller: ServerAdministrator, plane: PlaneDependency) -> WebhookList:
    """List the webhooks, without their secrets."""
    return WebhookList(webhooks=webhooks.list_webhooks(plane))


@router.post("", status_code=201, responses=problem_responses())
def create_webhook(
    caller: ServerAdministrator, body: WebhookRequest, plane: PlaneDependency, response: Response
) -> NewWebhook:
    """Create a webhook that receives events from now on.

    Messages are signed as in the Standard Webhooks specification. Only this answer contains the
    secret.
    """
    response.headers["Cache-Control"] = "no-store"
    return webhooks.create_webhook(plane, caller, body)


@router.delete("/" + named("webhook"), status_code=204, responses=problem_responses(404))
def delete_webhook(caller: ServerAdministrator, webhook: WebhookId, plane: PlaneDependency) -> None:
    """Delete a webhook. Events that it has not received yet are dropped."""
    webhooks.delete_webhook(plane, caller, webhook)


@router.post("/{webhook}:test", status_code=202, responses=problem_responses(404))
def test_webhook(
    caller: ServerAdministrator, webhook: WebhookId, plane: PlaneDependency
) -> Delivery:
    """Send a `webhook.test` event to this webhook, signed and delivered like any other event."""
    return webhooks.send_test(plane, caller, webhook)


@router.get("/{webhook}/deliveries", responses=problem_responses(404))
def list_deliveries(
    caller: ServerAdministrator,
    webhook: WebhookId,
    plane: PlaneDependency,
    state: StateFilter = None,
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> DeliveryList:
    """List the deliveries to a webhook, newest first."""
    listing = f"deliveries of {webhook}, {state}"
    token = decode_token(listing, page_token, kinds=(int,))
    page, more = webhooks.list_deliveries(
        plane,
        webhook,
        before=int(token[0]) if token else None,
        limit=page_size,
        state=state,
    )
    return DeliveryList(
        deliveries=page,
        next_page_token=encode_token(listing, (page[-1].id,)) if more else None,
    )


@router.post(
    "/{webhook}/deliveries/{delivery}:redeliver",
    status_code=202,
    responses=problem_responses(404),
)
def redeliver(
    caller: ServerAdministrator, webhook: WebhookId, delivery: DeliveryId, plane: PlaneDependency
) -> Delivery:
    """Try a delivery again, whatever its state. Later deliveries of its run wait for it."""
    return webhooks.redeliver(plane, caller, webhook, delivery)
