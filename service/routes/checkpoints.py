"""Checkpoints of a run: lists, promotion, deletion."""

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Response

from cairn.service.catalog import (
    CheckpointRow,
    RunRow,
    note_alias,
    note_deletion,
    queries,
    read_annotations,
    rows,
)
from cairn.service.deletion import delete, deletion_body, read_deletions, undelete
from cairn.service.dependencies import (
    MAX_STEP,
    CatalogDependency,
    IndexDependency,
    PageSize,
    PageToken,
    RootName,
    RunDependency,
    StepNumber,
)
from cairn.service.http import (
    ActorDependency,
    ExpectationDependency,
    decode_token,
    encode_token,
    etag,
    problem_responses,
)
from cairn.service.promotion import alias_body, promote
from cairn.service.schemas import (
    GRACE_SECONDS,
    LONGEST_GRACE_SECONDS,
    Alias,
    Checkpoint,
    CheckpointList,
    CheckpointState,
    PromoteRequest,
    UndeleteRequest,
)
from cairn.storage.errors import RunNotFoundError
from cairn.storage.runs import Run, StepInfo, StepState, Tombstone
from cairn.storage.store import from_rfc3339

router: Final = APIRouter(prefix="/roots/{root}/runs/{run}/checkpoints", tags=["checkpoints"])

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
# A step in one of these may have no manifest: the catalog does not know it, the store does.
UNPUBLISHED: Final = frozenset(CheckpointState) - {CheckpointState.LISTED, CheckpointState.TRASHED}


@router.get("", responses=problem_responses(404))
def list_checkpoints(
    root: RootName,
    run: RunDependency,
    index: IndexDependency,
    state: StateFilter = CheckpointState.LISTED,
    page_size: PageSize = 50,
    page_token: PageToken = None,
) -> CheckpointList:
    """Checkpoints of a run, highest step first."""
    listing = f"checkpoints of {root}/{run.uri.name}, {state}"
    before = decode_token(listing, page_token, kinds=(int, int))
    index.refresh_run(root, run)
    wanted = None if state == "all" else CheckpointState(state)
    with index.catalog.read() as session:
        row = _run_row(rows.find_run(session, root, run.uri.name), run)
        found = queries.checkpoint_rows(
            session, row, state=wanted, before=before, limit=page_size + 1
        )
        named = queries.alias_names(session, row)
    bodies = _bodies(index, run, row, found, named)
    if wanted is None or wanted in UNPUBLISHED:
        bodies += [
            _unpublished(row, run, info)
            for info in run.unpublished()
            if (wanted is None or info.state.value == wanted.value)
            and (not before or (info.step, info.attempt) < before)
        ]
        bodies.sort(key=lambda body: (body.step, body.attempt), reverse=True)
    page = bodies[:page_size]
    more = len(bodies) > page_size
    return CheckpointList(
        checkpoints=page,
        next_page_token=encode_token(listing, (page[-1].step, page[-1].attempt)) if more else None,
    )


@router.get("/{step}", responses=problem_responses(404))
def get_checkpoint(
    root: RootName, run: RunDependency, step: StepNumber, index: IndexDependency
) -> Checkpoint:
    """One step, whatever its state; of several attempts at it the one that is listed, or the last.

    A step that is being written has no size yet, nor anything else that its manifest will tell.
    """
    index.refresh_run(root, run)
    with index.catalog.read() as session:
        row = _run_row(rows.find_run(session, root, run.uri.name), run)
        saved = {found.attempt: found for found in queries.step_rows(session, row, step)}
        named = queries.alias_names(session, row)
    listed = [found for found in saved.values() if found.state == CheckpointState.LISTED]
    if listed:
        return _bodies(index, run, row, listed, named)[0]
    others = [info for info in run.unpublished() if info.step == step]
    last = max((info.attempt for info in others), default=-1)
    if saved and max(saved) > last:
        return _bodies(index, run, row, [saved[max(saved)]], named)[0]
    for info in others:
        if info.attempt == last:
            return _unpublished(row, run, info)
    return _unpublished(row, run, run.step(step))  # raises, unless it was published just now


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
    moved = promote(run, step, body.alias, by=actor, reason=body.reason, expect=expect)
    note_alias(catalog, root=root, run=run, actor=actor, alias=moved)
    response.headers["ETag"] = etag(moved.sequence)
    return alias_body(moved)


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
    info, tombstone = delete(
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
    return _saved(index, root, run, info.step, info.attempt)


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
    attempt = undelete(run, step, body.attempt)
    detail = {"step": step, "attempt": attempt}
    note_deletion(
        index.catalog, "checkpoint.undelete", root=root, run=run, actor=actor, detail=detail
    )
    return _saved(index, root, run, step, attempt)


def _saved(index: IndexDependency, root: str, run: Run, step: int, attempt: int) -> Checkpoint:
    """A step as it stands after a change."""
    index.refresh_run(root, run)
    with index.catalog.read() as session:
        row = _run_row(rows.find_run(session, root, run.uri.name), run)
        saved = [one for one in queries.step_rows(session, row, step) if one.attempt == attempt]
        named = queries.alias_names(session, row)
    if saved:
        return _bodies(index, run, row, saved, named)[0]
    # Its manifest can't be read, so the catalog does not know it.
    deletions = read_deletions(run, [(step, attempt)])
    held = run.step_attempts().get(step) == attempt
    kept = StepState.LISTED if held else StepState.SET_ASIDE
    state = StepState.TRASHED if deletions else kept
    body = _unpublished(row, run, StepInfo(step, attempt, state))
    return _with_deletions([body], deletions)[0]


def _run_row(row: RunRow | None, run: Run) -> RunRow:
    if row is None:
        raise RunNotFoundError(
            "no such run", path=run.uri, expected="a run", found="one that was just deleted"
        )
    return row


def _bodies(
    index: IndexDependency,
    run: Run,
    row: RunRow,
    page: list[CheckpointRow],
    named: dict[tuple[int, int], list[str]],
) -> list[Checkpoint]:
    """A page with the labels and metrics that the store has now; they may change at any time."""
    annotations = read_annotations(run, [(found.step, found.attempt) for found in page])
    changed = []
    for found in page:
        annotation = annotations[found.step, found.attempt]
        now = annotation.model_dump(mode="json")
        if (found.labels, found.metrics) != (now["labels"], now["metrics"]):
            found.labels, found.metrics = now["labels"], now["metrics"]
            changed.append((found, annotation))
    if changed:
        with index.catalog.write() as session:
            rows.write_annotations(session, changed)
    bodies = [
        queries.checkpoint(row, found, named.get((found.step, found.attempt), [])) for found in page
    ]
    trashed = [
        (body.step, body.attempt) for body in bodies if body.state is CheckpointState.TRASHED
    ]
    return _with_deletions(bodies, read_deletions(run, trashed))


def _with_deletions(
    bodies: list[Checkpoint], deletions: Mapping[tuple[int, int], Tombstone]
) -> list[Checkpoint]:
    return [
        body.model_copy(update={"deletion": deletion_body(deletions[body.step, body.attempt])})
        if (body.step, body.attempt) in deletions
        else body
        for body in bodies
    ]


def _unpublished(row: RunRow, run: Run, info: StepInfo) -> Checkpoint:
    """A step without a manifest."""
    return Checkpoint(
        root=row.root,
        run=row.name,
        step=info.step,
        attempt=info.attempt,
        state=CheckpointState(info.state.value),
        uri=str(run.step_uri(info)),
        created=None if info.created is None else from_rfc3339(info.created),
        bytes=info.nbytes,
        leaves=None,
        items=[],
        iterators={},
        manifest_digest=info.manifest_digest,
        model_type=None,
        aliases=[],
        labels={},
        metrics={},
    )
