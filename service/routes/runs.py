"""Runs of all roots or of one: list, create, get, label, and disk usage."""

from collections.abc import Mapping, Sequence
from typing import Final

from fastapi import APIRouter, Request, Response

from cairn.service.access.permission import Operator, Reader
from cairn.service.actions import runs as runs_actions
from cairn.service.actions import usage
from cairn.service.actions.plane import ControlPlane
from cairn.service.dependencies import (
    Columns,
    Filter,
    OrderBy,
    PageSize,
    PageToken,
    PlaneDependency,
    Refresh,
    RootName,
    RunName,
)
from cairn.service.filters.columns import parse_columns
from cairn.service.filters.expressions import Path
from cairn.service.filters.fields import RUN_FIELDS
from cairn.service.filters.search import EVERYTHING, Search
from cairn.service.http.answers import NOT_CHANGED, created_answer, json_answer, tagged_answer
from cairn.service.http.limited_routes import StoreReadRoute, StoreRoute
from cairn.service.http.paging import decode_token, encode_token
from cairn.service.http.path_names import named
from cairn.service.http.preconditions import Condition, SeenDependency
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import AnnotateRunRequest, CreateRunRequest, Run, RunList, RunUsage
from cairn.storage.store.uri import StoreURI

router: Final = APIRouter(tags=["runs"], route_class=StoreRoute)

_LAST: Final[Mapping[str, type]] = {"root": str, "name": str}
"""Keys that break ties of every order, with their types."""


@router.get("/runs", response_model=RunList)
def list_all_runs(
    caller: Reader,
    plane: PlaneDependency,
    filter: Filter = "",
    order_by: OrderBy = "",
    columns: Columns = "",
    page_size: PageSize = 50,
    page_token: PageToken = None,
    refresh: Refresh = False,
) -> Response:
    """List the runs of all roots, by root and name unless `order_by` says otherwise.

    Fields: `root`, `name`, `created`, `bytes`, `latest_step`, `checkpoint_count`, `labels.NAME`,
    `config.NAME`, `metrics.NAME` (the value at the latest step that has the metric), `best.NAME`
    (the best value of the listed steps, if a step says whether small or large values are good); in
    filters also `aliases` and `states`.
    """
    search = Search.parse(filter, order_by, RUN_FIELDS)
    paths = parse_columns(columns, RUN_FIELDS)
    roots = caller.visible(plane.roots)
    page = page_of_runs(
        plane, roots, page_size, page_token, search=search, refresh=refresh, columns=paths
    )
    return json_answer(page)


@router.get("/roots/{root}/runs", response_model=RunList, responses=problem_responses(404))
def list_runs(
    caller: Reader,
    root: RootName,
    plane: PlaneDependency,
    filter: Filter = "",
    order_by: OrderBy = "",
    columns: Columns = "",
    page_size: PageSize = 50,
    page_token: PageToken = None,
    refresh: Refresh = False,
) -> Response:
    """List the runs of a root, by name unless `order_by` says otherwise.

    The fields are those of the list of all runs.
    """
    search = Search.parse(filter, order_by, RUN_FIELDS)
    paths = parse_columns(columns, RUN_FIELDS)
    roots = {root: plane.root(root)}
    page = page_of_runs(
        plane, roots, page_size, page_token, of=root, search=search, refresh=refresh, columns=paths
    )
    return json_answer(page)


@router.post(
    "/roots/{root}/runs",
    status_code=201,
    response_model=Run,
    responses=problem_responses(404, 409),
)
def create_run(
    caller: Operator,
    root: RootName,
    body: CreateRunRequest,
    plane: PlaneDependency,
    request: Request,
) -> Response:
    """Create a run before its job starts. The job that saves there later keeps the run's labels.

    `Location` has the path of the run. The run lists no step until a job saves one.
    """
    created = runs_actions.create_run(plane, caller, root, body.name, body.labels)
    return created_answer(created, f"{request.url.path}/{created.name}")


@router.get(
    "/roots/{root}/runs/" + named("run"),
    response_model=Run,
    responses={304: NOT_CHANGED, **problem_responses(404)},
)
def get_run(
    caller: Reader,
    root: RootName,
    run: RunName,
    plane: PlaneDependency,
    refresh: Refresh = False,
    if_none_match: Condition = None,
) -> Response:
    """Get a run."""
    return tagged_answer(runs_actions.get_run(plane, root, run, refresh=refresh), if_none_match)


@router.patch(
    "/roots/{root}/runs/" + named("run"),
    response_model=Run,
    responses=problem_responses(404, 412, 428),
)
def annotate_run(
    caller: Operator,
    root: RootName,
    run: RunName,
    body: AnnotateRunRequest,
    seen: SeenDependency,
    plane: PlaneDependency,
) -> Response:
    """Set labels of a run. Null removes a label; labels not named stay.

    `If-Match` must be the ETag of the run as last seen, or `*`; the ETag changes with every save. A
    stale ETag is answered with 412, with the run as it is now in `current`.
    """
    changed = runs_actions.annotate_run_labels(plane, caller, root, run, body.labels, seen=seen)
    return tagged_answer(changed)


def get_usage(caller: Reader, root: RootName, run: RunName, plane: PlaneDependency) -> RunUsage:
    """Get the bytes that a run takes in the store: in total, by use, and per step.

    The server counts them now, from the names and sizes that the store lists.
    """
    return usage.get_usage(plane, root, run)


router.add_api_route(
    "/roots/{root}/runs/{run}/usage",
    get_usage,
    responses=problem_responses(404),
    route_class_override=StoreReadRoute,
)


def page_of_runs(
    plane: ControlPlane,
    roots: Mapping[str, StoreURI],
    page_size: int,
    page_token: str | None,
    *,
    of: str | None = None,
    search: Search = EVERYTHING,
    refresh: bool = False,
    columns: Sequence[Path] = (),
) -> RunList:
    """Return a page of runs.

    Args:
        plane: Control plane that has the runs.
        roots: Roots to list, by name.
        page_size: Largest number of runs on the page.
        page_token: `next_page_token` of the page before; None for the first page.
        of: Root whose runs are listed; None: all roots. A page token is valid only for the list
            that it comes from.
        search: Filter and order.
        refresh: Update the catalog from the store first.
        columns: Metrics, config values and labels to add to each run.
    """
    listing = ("runs" if of is None else f"runs of {of}") + search.mark
    after = decode_token(listing, page_token, kinds=search.key_kinds(_LAST))
    runs, last = runs_actions.list_runs(
        plane, roots, search, after=after, limit=page_size, refresh=refresh, columns=columns
    )
    return RunList(runs=runs, next_page_token=encode_token(listing, last) if last else None)
