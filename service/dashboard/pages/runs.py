"""All runs: `/`."""

from typing import Annotated, Any, Final

from fastapi import Query, Request
from fastapi.responses import HTMLResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import activity, reclaimable
from cairn.service.actions import failures as failures_actions
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import page
from cairn.service.dependencies import OrderBy, PageToken, PlaneDependency
from cairn.service.filters.expressions import quote
from cairn.service.filters.fields import RUN_FIELDS
from cairn.service.filters.search import Search
from cairn.service.routes.runs import page_of_runs
from cairn.service.schemas import PLAIN_PATTERN, RetentionPolicy

ROWS: Final = 50

STATES: Final = (
    ("", "Any"),
    ("damaged", "Has damaged steps"),
    ("in_flight", "Saving"),
    ("abandoned", "Has an abandoned step"),
    ("superseded", "Has superseded steps"),
    ("trashed", "Has steps in trash"),
)
ORDERS: Final = (
    ("created desc", "Newest first"),
    ("name", "Name"),
    ("bytes desc", "Largest first"),
    ("checkpoint_count desc", "Most steps first"),
    ("latest_step desc", "Highest step first"),
)

MAX_ALIASES: Final = 4
"""Largest number of aliases that the list shows per run."""

KEPT: Final = (1, 3, 5, 10, 25, 100)
"""Choices of `keep_last` for the reclaimable bytes of runs without a schedule."""

router: Final = page_router()

Kept = Annotated[int, Query(ge=1, le=1_000_000)]
PageRequest = Annotated[str, Query(max_length=300, pattern=PLAIN_PATTERN)]


@router.get("/")
def runs_page(
    request: Request,
    caller: Reader,
    plane: PlaneDependency,
    q: PageRequest = "",
    owner: PageRequest = "",
    label: PageRequest = "",
    state: PageRequest = "",
    order_by: OrderBy = ORDERS[0][0],
    keep_last: Kept = 3,
    page_token: PageToken = None,
) -> HTMLResponse:
    """Show the runs of all roots."""
    roots = caller.visible(plane.roots)
    search = Search.parse(run_filter(q, owner, label, state), order_by, RUN_FIELDS)
    listed = page_of_runs(plane, roots, ROWS, page_token, search=search)
    activities = activity.run_activity(plane, listed.runs)
    failures = failures_actions.run_failures(plane, listed.runs)
    freed = reclaimable.reclaimable(plane, listed.runs, RetentionPolicy(keep_last=keep_last))
    filters: dict[str, Any] = {"q": q, "owner": owner, "label": label, "state": state}
    return page(
        request,
        "runs/runs.html",
        runs=list(zip(listed.runs, activities, failures, freed, strict=True)),
        next_page_token=listed.next_page_token,
        roots={name: str(uri) for name, uri in roots.items()},
        several_roots=len(roots) > 1,
        searched=search.filter is not None or page_token is not None,
        asked=filters | {"order_by": order_by},
        states=STATES,
        orders=ORDERS,
        keep_last=keep_last,
        most_aliases=MAX_ALIASES,
        kept=sorted({*KEPT, keep_last}),
    )


def run_filter(q: str, owner: str, label: str, state: str) -> str:
    """Translate the search form's fields into a filter of the API."""
    name, _, value = label.partition("=")
    parts = [
        f"name:{quote(q.strip())}" if q.strip() else "",
        f"labels.owner = {quote(owner.strip())}" if owner.strip() else "",
        f"states:{quote(state)}" if state else "",
    ]
    if name.strip():
        key = f"labels.{quote(name.strip())}"
        parts.append(f"{key} = {quote(value.strip())}" if value.strip() else f"{key}:*")
    return " AND ".join(part for part in parts if part)
