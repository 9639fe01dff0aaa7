"""Going back to a checkpoint: in a new run (fork) or in its own run (rollback)."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.access.permission import Operator
from cairn.service.actions import restore
from cairn.service.dependencies import (
    IdempotencyKey,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.http.answers import accepted
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.preconditions import MaybeSeenDependency
from cairn.service.http.problems import problem_responses
from cairn.service.schemas import Operation, RestoreRequest

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["jobs"], route_class=StoreRoute
)


@router.post("/{step}:restore", status_code=202, responses=problem_responses(404, 409, 412, 428))
def restore_checkpoint(
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    body: RestoreRequest,
    plane: PlaneDependency,
    response: Response,
    seen: MaybeSeenDependency,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start a new run from the step (fork), or supersede the run's later steps (rollback).

    A rollback requires `If-Match` with the ETag of the run, or `*`. It also requires the names of
    the aliases that point to steps that it supersedes (`strand`), and that no job writes the run.
    A fork requires a free run name, and is refused at once otherwise; the store decides what is
    free, even if the catalog does not list a run yet. The result of a fork says how many files and
    bytes of the copy were checked, and what was compared. A damaged step is refused with 409,
    `step-damaged`, unless `despite_damage` gives a reason.
    """
    started = restore.restore_checkpoint(
        plane, caller, root, run, step, body, seen=seen, idempotency_key=idempotency_key
    )
    return accepted(started, response)
