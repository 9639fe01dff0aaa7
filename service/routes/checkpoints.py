"""Checkpoints of a run: lists, promotion, deletion."""

from collections.abc import Mapping
from typing import Annotated, Final

from fastapi import APIRouter, BackgroundTasks, Query, Response

from cairn.service.access.permission import Operator, Reader
from cairn.service.actions import aliases
from cairn.service.actions import checkpoints as checkpoints_actions
from cairn.service.actions.plane import ControlPlane
from cairn.service.dependencies import (
    MAX_STEP,
    Filter,
    OrderBy,
    PageSize,
    PageToken,
    PlaneDependency,
    Refresh,
    RequestMetricsDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.filters.fields import CHECKPOINT_FIELDS
from cairn.service.filters.search import EVERYTHING, Search
from cairn.service.http.answers import NOT_CHANGED, json_answer, tagged_answer
from cairn.service.http.entity_tags import etag
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.paging import decode_token, encode_token
from cairn.service.http.path_names import named
from cairn.service.http.preconditions import Condition, ExpectationDependency, SeenDependency
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import (
    AVAILABLE,
    GRACE_SECONDS,
    MAX_GRACE_SECONDS,
    PLAIN_PATTERN,
    Alias,
    AnnotateRequest,
    AnnounceRequest,
    Checkpoint,
    CheckpointList,
    PromoteRequest,
    States,
    UndeleteRequest,
)

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["checkpoints"], route_class=StoreRoute
)

_LAST: Final[Mapping[str, type]] = {"step": int, "attempt": int}
"""Keys that break ties of every order, with their types."""

StateFilter = Annotated[
    States | None,
    Query(
        description="Steps of this state only, or `all`; `available` are those that are `listed` "
        "or `damaged`. Default: `available`; `all` where the filter asks about `state`."
    ),
]
AttemptFilter = Annotated[
    int | None,
    Query(ge=0, le=MAX_STEP, description="Delete this attempt's; default: the one listed."),
]
Reason = Annotated[
    str, Query(max_length=2000, pattern=PLAIN_PATTERN, description="Kept with the deletion.")
]
Grace = Annotated[
    float,
    Query(ge=0, le=MAX_GRACE_SECONDS, description="How long the step can be had back."),
]


@router.get("", response_model=CheckpointList, responses=problem_responses(404))
def list_checkpoints(
    caller: Reader,
    root: RootName,
    run: RunName,
    plane: PlaneDependency,
    state: StateFilter = None,
    filter: Filter = "",
    order_by: OrderBy = "",
    page_size: PageSize = 50,
    page_token: PageToken = None,
    refresh: Refresh = False,
) -> Response:
    """List the checkpoints of a run, highest step first unless `order_by` says otherwise.

    Fields: `step`, `attempt`, `state`, `created`, `bytes`, `leaves`, `model_type`, `labels.NAME`,
    `metrics.NAME`, `better.NAME`; in filters also `aliases`.
    """
    search = Search.parse(filter, order_by, CHECKPOINT_FIELDS)
    if state is None:
        state = "all" if search.names("state") else AVAILABLE
    page = page_of_checkpoints(
        plane, root, run, state, page_size, page_token, search=search, refresh=refresh
    )
    return json_answer(page)


def page_of_checkpoints(
    plane: ControlPlane,
    root: str,
    run: str,
    state: States,
    page_size: int,
    page_token: str | None,
    *,
    search: Search = EVERYTHING,
    refresh: bool = False,
) -> CheckpointList:
    """Return a page of a run's checkpoints, highest step first unless `search` has an order.

    Args:
        plane: Control plane that has the run.
        root: Name of the run's root.
        run: Name of the run.
        state: States of the steps to return.
        page_size: Largest number of checkpoints on the page.
        page_token: `next_page_token` of the page before; None for the first page.
        search: Filter and order.
        refresh: Update the catalog from the store first.
    """
    listing = f"checkpoints of {root}/{run}, {state}{search.mark}"
    page, last = checkpoints_actions.list_checkpoints(
        plane,
        root,
        run,
        search,
        state=state,
        after=decode_token(
            listing, page_token, kinds=search.key_kinds({"step": int, "attempt": int})
        ),
        limit=page_size,
        refresh=refresh,
    )
    token = encode_token(listing, last) if last else None
    return CheckpointList(checkpoints=page, next_page_token=token)


@router.post("", responses=problem_responses(404))
def announce_checkpoint(
    caller: Reader,
    root: RootName,
    run: RunName,
    body: AnnounceRequest,
    plane: PlaneDependency,
    metrics: RequestMetricsDependency,
) -> Checkpoint:
    """Announce a saved step, so that the server reads it from the store and lists it at once.

    The announcement is only a hint: the store decides what is listed.
    """
    plane.place(root, run)
    with metrics.announcement(root):
        return checkpoints_actions.get_checkpoint(
            plane, root, run, body.step, attempt=body.attempt, refresh=True
        )


@router.get(
    "/" + named("step"),
    response_model=Checkpoint,
    responses={304: NOT_CHANGED, **problem_responses(404)},
)
def get_checkpoint(
    caller: Reader,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    refresh: Refresh = False,
    if_none_match: Condition = None,
) -> Response:
    """Get a step in any state. Of several attempts, get the listed one, or else the last one.

    A step that is still being written has no size yet, and no other field that comes from its
    manifest.
    """
    checkpoint = checkpoints_actions.get_checkpoint(plane, root, run, step, refresh=refresh)
    return tagged_answer(checkpoint, if_none_match)


@router.patch(
    "/" + named("step"),
    response_model=Checkpoint,
    responses=problem_responses(404, 409, 412, 428),
)
def annotate_checkpoint(
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    body: AnnotateRequest,
    seen: SeenDependency,
    plane: PlaneDependency,
) -> Response:
    """Set labels and metrics of a listed step. Null removes an entry; entries not named stay.

    `If-Match` must be the ETag of the step as last seen, or `*`. A stale ETag is answered with 412,
    with the step as it is now in `current`.
    """
    changed = checkpoints_actions.annotate_checkpoint(
        plane,
        caller,
        root,
        run,
        step,
        labels=body.labels,
        metrics=body.metrics,
        better=body.better,
        seen=seen,
    )
    return tagged_answer(changed)


@router.post("/{step}:promote", responses=problem_responses(404, 409, 412, 428))
def promote_checkpoint(
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    body: PromoteRequest,
    expect: ExpectationDependency,
    plane: PlaneDependency,
    response: Response,
    background: BackgroundTasks,
) -> Alias:
    """Point an alias at a listed step. A damaged step is refused with 409, `step-damaged`.

    `If-Match: "<sequence>"` moves the alias if it is still as last seen. `If-None-Match: *`
    creates it. A failed condition is answered with 412, with the alias as it is now in `current`.
    """
    expect.require_possible()
    moved = aliases.promote(
        plane,
        caller,
        root,
        run,
        step,
        alias=body.alias,
        reason=body.reason,
        expect=expect.sequence,
        attempt=body.attempt,
        later=background.add_task,
    )
    response.headers["ETag"] = etag(moved.sequence)
    return moved


@router.delete("/" + named("step"), responses=problem_responses(404, 409))
def delete_checkpoint(
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    attempt: AttemptFilter = None,
    reason: Reason = "",
    grace_seconds: Grace = GRACE_SECONDS,
) -> Checkpoint:
    """Delete a listed or superseded step.

    The step is no longer listed. It can be undeleted until the grace time is over; after that,
    garbage collection removes its bytes. No precondition is needed, since a saved step never
    changes. If the step may have been saved again, `attempt` selects the one to delete. A step that
    an alias names is refused (409), and so is the latest step while a job writes the run.
    """
    return checkpoints_actions.delete_checkpoint(
        plane, caller, root, run, step, attempt=attempt, reason=reason, grace=grace_seconds
    )


@router.post("/{step}:undelete", responses=problem_responses(404))
def undelete_checkpoint(
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    body: UndeleteRequest,
    plane: PlaneDependency,
) -> Checkpoint:
    """Undo the deletion of a step.

    The step is listed again. If the run was rolled back to an earlier step meanwhile, the step is
    superseded instead.
    """
    return checkpoints_actions.undelete_checkpoint(plane, caller, root, run, step, body.attempt)
