"""Checkpoints of a run: lists, promotion, deletion."""

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Response

from cairn.service import actions
from cairn.service.catalog import note_alias, note_deletion
from cairn.service.dependencies import (
    MAX_STEP,
    CatalogDependency,
    IndexDependency,
    PageSize,
    PageToken,
    Refresh,
    RequestMetricsDependency,
    RootName,
    RunDependency,
    RunURIDependency,
    StepNumber,
)
from cairn.service.http import (
    ActorDependency,
    ExpectationDependency,
    StoreRoute,
    decode_token,
    encode_token,
    etag,
    problem_responses,
)
from cairn.service.schemas import (
    GRACE_SECONDS,
    LONGEST_GRACE_SECONDS,
    Alias,
    AnnounceRequest,
    Checkpoint,
    CheckpointList,
    CheckpointState,
    PromoteRequest,
    UndeleteRequest,
)

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["checkpoints"], route_class=StoreRoute
)

StateFilter = Annotated[
    CheckpointState | Literal["all"], Query(description="Steps of this state only, or `all`.")
]
AttemptFilter = Annotated[
    int | None,
    Query(ge=0, le=MAX_STEP, description="Delete this attempt's; default: the one listed."),
]
Reason = Annotated[str, Query(max_length=2000, description="Kept with the deletion.")]
Grace = Annotated[
    float,
    Query(ge=0, le=LONGEST_GRACE_SECONDS, description="How long the step can be had back."),
]


@router.get("", responses=problem_responses(404))
def list_checkpoints(
    root: RootName,
    uri: RunURIDependency,
    index: IndexDependency,
    state: StateFilter = CheckpointState.LISTED,
    page_size: PageSize = 50,
    page_token: PageToken = None,
    refresh: Refresh = False,
) -> CheckpointList:
    """Checkpoints of a run, highest step first."""
    listing = f"checkpoints of {root}/{uri.name}, {state}"
    page, more = actions.list_checkpoints(
        index,
        root,
        uri,
        state=None if state == "all" else CheckpointState(state),
        before=decode_token(listing, page_token, kinds=(int, int)),
        limit=page_size,
        refresh=refresh,
    )
    last = (page[-1].step, page[-1].attempt) if more else None
    token = None if last is None else encode_token(listing, last)
    return CheckpointList(checkpoints=page, next_page_token=token)


@router.post("", responses=problem_responses(404))
def announce_checkpoint(
    root: RootName,
    uri: RunURIDependency,
    body: AnnounceRequest,
    index: IndexDependency,
    metrics: RequestMetricsDependency,
) -> Checkpoint:
    """Tell of a step that was saved: the store is looked at, and lists have it from then on.

    A hint, and no more: what counts is what the store says.
    """
    with metrics.announcement(root):
        return actions.get_checkpoint(
            index, root, uri, body.step, attempt=body.attempt, refresh=True
        )


@router.get("/{step}", responses=problem_responses(404))
def get_checkpoint(
    root: RootName,
    uri: RunURIDependency,
    step: StepNumber,
    index: IndexDependency,
    refresh: Refresh = False,
) -> Checkpoint:
    """One step, whatever its state; of several attempts at it the one that is listed, or the last.

    A step that is being written has no size yet, nor anything else that its manifest will tell.
    """
    return actions.get_checkpoint(index, root, uri, step, refresh=refresh)


@router.post("/{step}:promote", responses=problem_responses(404, 409, 412, 428))
def promote_checkpoint(
    root: RootName,
    run: RunDependency,
    step: StepNumber,
    body: PromoteRequest,
    expect: ExpectationDependency,
    actor: ActorDependency,
    catalog: CatalogDependency,
    response: Response,
) -> Alias:
    """Point an alias at a listed step.

    `If-Match: "<sequence>"` moves the alias if it is still as last seen; `If-None-Match: *`
    creates it. A stale one gets 412, with the alias as it is now in `current`.
    """
    moved = actions.promote(run, step, body.alias, by=actor, reason=body.reason, expect=expect)
    note_alias(catalog, root=root, run=run, actor=actor, alias=moved)
    response.headers["ETag"] = etag(moved.sequence)
    return actions.alias_body(moved)


@router.delete("/{step}", responses=problem_responses(404, 409))
def delete_checkpoint(
    root: RootName,
    run: RunDependency,
    step: StepNumber,
    index: IndexDependency,
    actor: ActorDependency,
    attempt: AttemptFilter = None,
    reason: Reason = "",
    grace_seconds: Grace = GRACE_SECONDS,
) -> Checkpoint:
    """Delete a step that is listed or was set aside.

    It is listed no more, and can be undeleted until the grace time is over; then collecting garbage
    removes its bytes. No precondition is needed, since a saved step never changes; `attempt` says
    which one is meant if the step may have been saved anew. What an alias names stays (409), and so
    does the latest step while a job writes the run.
    """
    info, tombstone = actions.delete(
        run, step, attempt=attempt, by=actor, reason=reason, grace=grace_seconds
    )
    note_deletion(
        index.catalog,
        "checkpoint.delete",
        root=root,
        run=run,
        actor=actor,
        detail={
            "step": info.step,
            "attempt": info.attempt,
            "reason": tombstone.reason,
            "expires": tombstone.expires,
        },
    )
    return actions.get_checkpoint(
        index, root, run.uri, info.step, attempt=info.attempt, refresh=True
    )


@router.post("/{step}:undelete", responses=problem_responses(404))
def undelete_checkpoint(
    root: RootName,
    run: RunDependency,
    step: StepNumber,
    body: UndeleteRequest,
    index: IndexDependency,
    actor: ActorDependency,
) -> Checkpoint:
    """Take the deletion of a step back.

    It is listed again, unless the run went back before it meanwhile: then it is set aside.
    """
    attempt = actions.undelete(run, step, body.attempt)
    detail = {"step": step, "attempt": attempt}
    note_deletion(
        index.catalog, "checkpoint.undelete", root=root, run=run, actor=actor, detail=detail
    )
    return actions.get_checkpoint(index, root, run.uri, step, attempt=attempt, refresh=True)
