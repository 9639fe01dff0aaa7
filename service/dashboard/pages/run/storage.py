"""What a run takes, and what a policy would free: `/ui/{root}/{run}/storage`."""

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from cairn.service import actions
from cairn.service.access import Reader
from cairn.service.dashboard.acting.policies import PolicyFields, policy_of
from cairn.service.dashboard.drawing.growth import growth
from cairn.service.dashboard.page_routes import StorePage
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import PlaneDependency, RootName, RunName
from cairn.service.schemas import PLAIN_PATTERN

ROWS: Final = 100

router: Final = APIRouter(
    include_in_schema=False, default_response_class=HTMLResponse, route_class=StorePage
)

Field = Annotated[str, Query(max_length=300, pattern=PLAIN_PATTERN)]


@router.get("/ui/{root}/{run}/storage")
def storage_page(
    request: Request,
    caller: Reader,
    root: RootName,
    run: RunName,
    plane: PlaneDependency,
    keep_last: Field = "",
    keep_every: Field = "",
    keep_days: Field = "",
    best: Field = "",
    mode: Field = "min",
    best_count: Field = "",
    labelled: Field = "",
) -> HTMLResponse:
    """What one run takes in its store, and what retention would free."""
    asked = PolicyFields(keep_last, keep_every, keep_days, best, mode, best_count, labelled)
    plan = None
    if asked:
        plan = actions.plan_retention(plane, root, run, policy_of(asked))
    usage = actions.get_usage(plane, root, run)
    return page(
        request,
        "run/storage.html",
        run=actions.get_run(plane, root, run, refresh=False),
        usage=usage,
        steps=list(reversed(usage.steps))[:ROWS],
        growth=growth(usage.steps),
        asked=asked,
        plan=plan,
    )
