"""Pages for administrators of all roots: `/audit`, `/webhooks`, `/keys`."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import audit as audit_actions
from cairn.service.actions import keys
from cairn.service.actions import webhooks as webhooks_actions
from cairn.service.dashboard.page_routes import CatalogPage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import Filter, PageToken, PlaneDependency
from cairn.service.errors import UnknownWebhookError
from cairn.service.filters.fields import AUDIT_FIELDS
from cairn.service.filters.search import Search
from cairn.service.http.paging import decode_token, encode_token
from cairn.service.routes import webhooks
from cairn.service.schemas import DeliveryState, EventKind, Scope

ROWS: Final = 50

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=CatalogPage
)


@router.get("/audit")
def audit_page(
    request: Request,
    caller: ServerAdministrator,
    plane: PlaneDependency,
    filter: Filter = "",
    page_token: PageToken = None,
) -> HTMLResponse:
    """Show the audit events of this control plane, newest first."""
    search = Search.parse(filter, "", AUDIT_FIELDS)
    listing = f"audit events{search.mark}"
    after = decode_token(listing, page_token, kinds=(int,))
    entries, more = audit_actions.list_audit_events(plane, search, after=after, limit=ROWS)
    return page(
        request,
        "administration/audit.html",
        events=entries,
        next_page_token=encode_token(listing, (entries[-1].id,)) if more else None,
        filter=filter,
    )


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
        raise UnknownWebhookError(f"webhook {webhook!r}: expected one that is entered, found none")
    return page(
        request,
        "administration/webhook.html",
        webhook=rows[0],
        deliveries=deliveries.deliveries,
        next_page_token=deliveries.next_page_token,
        state=delivery_state,
        states=list(DeliveryState),
    )


@router.get("/keys")
def keys_page(
    request: Request, caller: ServerAdministrator, plane: PlaneDependency
) -> HTMLResponse:
    """Show the API keys and their permissions."""
    return page(
        request,
        "administration/keys.html",
        keys=keys.list_keys(plane),
        scopes=list(Scope),
        roots=list(plane.roots),
        needed=plane.settings.auth == "keys",
    )
