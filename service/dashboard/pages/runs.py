"""All runs: `/`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Final, Self

from fastapi import Query, Request
from fastapi.responses import HTMLResponse, JSONResponse

from cairn.service.access.permission import Reader
from cairn.service.actions import activity, reclaimable
from cairn.service.actions import failures as failures_actions
from cairn.service.actions import runs as runs_actions
from cairn.service.dashboard.page_routes import page_router
from cairn.service.dashboard.rendering import HEADERS, page
from cairn.service.dependencies import Columns, Filter, OrderBy, PageToken, PlaneDependency
from cairn.service.filters.columns import parse_columns
from cairn.service.filters.expressions import All, Path, quote
from cairn.service.filters.fields import METRIC_FIELDS, RUN_FIELDS
from cairn.service.filters.search import Search
from cairn.service.routes.runs import page_of_runs
from cairn.service.schemas import PLAIN_PATTERN, RetentionPolicy, RunColumn

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

COMMON: Final = 3
"""Number of metrics that the list shows if no columns are chosen."""

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
    filter: Filter = "",
    order_by: OrderBy = ORDERS[0][0],
    columns: Columns = "",
    keep_last: Kept = 3,
    page_token: PageToken = None,
) -> HTMLResponse:
    """Show the runs of all roots."""
    roots = caller.visible(plane.roots)
    search = run_search(q, owner, label, state, filter, order_by)
    listed = page_of_runs(plane, roots, ROWS, page_token, search=search)
    paths = parse_columns(columns, RUN_FIELDS)
    paths, cells = runs_actions.run_columns(plane, listed.runs, paths, common=COMMON)
    activities = activity.run_activity(plane, listed.runs)
    failures = failures_actions.run_failures(plane, listed.runs)
    freed = reclaimable.reclaimable(plane, listed.runs, RetentionPolicy(keep_last=keep_last))
    filters: dict[str, Any] = {"q": q, "owner": owner, "label": label, "state": state}
    return page(
        request,
        "runs/runs.html",
        runs=list(zip(listed.runs, activities, failures, freed, cells, strict=True)),
        columns=[Column.of(path, [row[at] for row in cells]) for at, path in enumerate(paths)],
        next_page_token=listed.next_page_token,
        roots={name: str(uri) for name, uri in roots.items()},
        several_roots=len(roots) > 1,
        searched=search.filter is not None or page_token is not None,
        asked=filters | {"filter": filter, "order_by": order_by, "columns": columns},
        states=STATES,
        orders=ORDERS,
        keep_last=keep_last,
        most_aliases=MAX_ALIASES,
        kept=sorted({*KEPT, keep_last}),
    )


@router.get("/runs/completions")
def completions(
    caller: Reader,
    plane: PlaneDependency,
    q: Filter = "",
    keyed_only: bool = False,
) -> JSONResponse:
    """Return what may follow in the box of the filter or of the columns, as JSON."""
    roots = caller.visible(plane.roots)
    completion = runs_actions.complete_field(plane, roots, q, keyed_only=keyed_only)
    return JSONResponse(asdict(completion), headers=HEADERS)


@dataclass(frozen=True)
class Column:
    """Head of a column of metrics, config values or labels.

    Attributes:
        text: Field in the language of filters and orders.
        name: Name of the metric, config entry or label.
        kind: Word that tells it from others of the same name; may be empty.
        ascending: Sorting by it begins with small values.
        is_number: Its values are numbers.
        is_undirected: It has the best values of a metric of which no step says which are better.
        has_unknown: Some run has more entries than the catalog keeps, and may have a value.
    """

    text: str
    name: str
    kind: str
    ascending: bool
    is_number: bool
    is_undirected: bool
    has_unknown: bool

    @classmethod
    def of(cls, path: Path, cells: Sequence[RunColumn]) -> Self:
        """Return the head of a column with these values."""
        is_metric = path.field in METRIC_FIELDS
        is_best = path.field == "best"
        kind = {"best": "best", "metrics": "last", "config": "config", "labels": ""}[path.field]
        return cls(
            text=path.text,
            name=path.key or "",
            kind=kind,
            ascending=not is_metric or any(cell.better == "min" for cell in cells),
            is_number=is_metric or any(isinstance(cell.value, float) for cell in cells),
            is_undirected=is_best
            and all(cell.value is None for cell in cells)
            and not all(cell.unknown for cell in cells),
            has_unknown=any(cell.unknown for cell in cells),
        )


def run_search(q: str, owner: str, label: str, state: str, filter: str, order_by: str) -> Search:
    """Return the search of the page's form: its filter, and what its other fields say."""
    own = Search.parse(filter, order_by, RUN_FIELDS)
    fields = Search.parse(run_filter(q, owner, label, state), "", RUN_FIELDS).filter
    parts = tuple(part for part in (own.filter, fields) if part is not None)
    return replace(own, filter=All(parts) if len(parts) > 1 else next(iter(parts), None))


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
