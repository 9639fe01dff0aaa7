"""Checkpoints of a run, and their promotion."""

from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Response

from service.auth import ActorDependency
from service.catalog import queries, rows
from service.catalog.audit import note_alias
from service.catalog.models import CheckpointRow, RunRow
from service.catalog.snapshot import read_annotations
from service.dependencies import (
    CatalogDependency,
    IndexDependency,
    PageSize,
    PageToken,
    RootName,
    RunDependency,
    StepNumber,
)
from service.etag import etag
from service.paging import decode_token, encode_token
from service.preconditions import ExpectationDependency
from service.problems import problem_responses
from service.promotion import alias_body, promote
from service.schemas import Alias, Checkpoint, CheckpointList, CheckpointState, PromoteRequest
from storage.clock import from_rfc3339
from storage.errors import RunNotFoundError
from storage.run import Run, StepInfo

router: Final = APIRouter(prefix="/roots/{root}/runs/{run}/checkpoints", tags=["checkpoints"])

StateFilter = Annotated[
    CheckpointState | Literal["all"], Query(description="Steps of this state only, or `all`.")
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
    return [
        queries.checkpoint(row, found, named.get((found.step, found.attempt), [])) for found in page
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
        manifest_digest=info.manifest_digest,
        model_type=None,
        aliases=[],
        labels={},
        metrics={},
    )
