"""Going back to a checkpoint: as a new run, or in its own."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service import actions
from cairn.service.access import Operator
from cairn.service.dependencies import (
    IdempotencyKey,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.http import MaybeSeenDependency, StoreRoute, problem_responses
from cairn.service.routes.jobs.accepted import accepted
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
    """Start a new run from the step (fork), or set the run's later steps aside (rollback).

    A rollback asks for `If-Match` with the ETag of the run, or `*`, and for the names of aliases
    that it strands: those of steps that it sets aside. It needs a run that nobody writes. A fork
    needs a name that is free, else it is refused at once: what the store has decides, whether the
    catalog knows it or not. What a fork results in says how many files and bytes of the copy were
    checked, and what was compared. A damaged step is refused with 409, `step-damaged`, unless
    `despite_damage` says why.
    """
    started = actions.restore_checkpoint(
        plane, caller, root, run, step, body, seen=seen, idempotency_key=idempotency_key
    )
    return accepted(started, response)
