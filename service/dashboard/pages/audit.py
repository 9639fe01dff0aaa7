"""Page of the audit trail: `/audit`."""

from typing import Final

from fastapi import Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import audit as audit_actions
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import Filter, PageToken, PlaneDependency
from cairn.service.filters.fields import AUDIT_FIELDS
from cairn.service.filters.search import Search
from cairn.service.http.paging import decode_token, encode_token

ROWS: Final = 50

router: Final = page_router()


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
