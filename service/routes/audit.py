"""Audit events."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.access.permission import ServerAdministrator
from cairn.service.actions import audit as audit_actions
from cairn.service.dependencies import Filter, PageSize, PageToken, PlaneDependency
from cairn.service.filters.fields import AUDIT_FIELDS
from cairn.service.filters.search import Search
from cairn.service.http.answers import json_answer
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.paging import decode_token, encode_token
from cairn.service.schemas import AuditEventList

router: Final = APIRouter(prefix="/audit-events", tags=["audit"], route_class=StoreRoute)


@router.get("", response_model=AuditEventList)
def list_audit_events(
    caller: ServerAdministrator,
    plane: PlaneDependency,
    filter: Filter = "",
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> Response:
    """List the audit events of this control plane, newest first.

    Only administrators of all roots may list them. Filter fields: `at`, `caller`, `action`, `root`,
    `run`, `outcome`.
    """
    search = Search.parse(filter, "", AUDIT_FIELDS)
    listing = f"audit events{search.mark}"
    after = decode_token(listing, page_token, kinds=(int,))
    page, more = audit_actions.list_audit_events(plane, search, after=after, limit=page_size)
    token = encode_token(listing, (page[-1].id,)) if more else None
    return json_answer(AuditEventList(audit_events=page, next_page_token=token))
