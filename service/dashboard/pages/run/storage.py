"""Disk usage of a run, and the bytes that a policy would free: `/ui/{root}/{run}/storage`."""

from typing import Annotated, Final

from fastapi import Query
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import clean_up, runs
from cairn.service.actions import usage as usage_actions
from cairn.service.dashboard.charts.growth import growth
from cairn.service.dashboard.forms.clean_up import PolicyFields, policy_of
from cairn.service.dashboard.page_routes import StorePage, page_router
from cairn.service.dashboard.requests import RunRequestDependency
from cairn.service.schemas import PLAIN_PATTERN

ROWS: Final = 100

router: Final = page_router(StorePage)

Field = Annotated[str, Query(max_length=300, pattern=PLAIN_PATTERN)]


@router.get("/ui/{root}/{run}/storage")
def storage_page(
    caller: Reader,
    request: RunRequestDependency,
    keep_last: Field = "",
    keep_every: Field = "",
    keep_days: Field = "",
    best: Field = "",
    mode: Field = "min",
    best_count: Field = "",
    labelled: Field = "",
) -> HTMLResponse:
    """Show the disk usage of a run, and the bytes that a retention policy would free."""
    fields = PolicyFields(keep_last, keep_every, keep_days, best, mode, best_count, labelled)
    plan = None
    if fields:
        plan = clean_up.plan_retention(request.plane, *request.names, policy_of(fields))
    usage = usage_actions.get_usage(request.plane, *request.names)
    return request.render(
        "run/storage.html",
        run=runs.get_run(request.plane, *request.names, refresh=False),
        usage=usage,
        steps=list(reversed(usage.steps))[:ROWS],
        growth=growth(usage.steps),
        asked=fields,
        plan=plan,
    )
