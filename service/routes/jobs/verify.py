"""Comparing what is stored with what was saved."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service import actions
from cairn.service.access import Administrator, Operator
from cairn.service.dependencies import (
    IdempotencyKey,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.http import StoreRoute, problem_responses
from cairn.service.routes.jobs.accepted import accepted
from cairn.service.schemas import Operation, RepairReport, RepairRequest, VerifyRunRequest

router: Final = APIRouter(prefix="/roots/{root}/runs", tags=["jobs"], route_class=StoreRoute)


@router.post(
    "/{run}/checkpoints/{step}:verify", status_code=202, responses=problem_responses(404, 409)
)
def verify_checkpoint(
    caller: Operator,
    root: RootName,
    run: RunName,
    step: StepNumber,
    plane: PlaneDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start reading every byte of a checkpoint, to compare it with its manifest.

    A sound checkpoint's operation succeeds; `result.steps` has what was read. A damaged one's fails
    with the problem `urn:cairn:problem:damaged`, whose `problems` name every file and leaf that is
    hit, and whose `steps` are those of a result. The checkpoint is `damaged` from then on, until a
    verification of it succeeds. Such an operation is not resumed: verify again.
    """
    started = actions.verify_checkpoint(
        plane, caller, root, run, step, idempotency_key=idempotency_key
    )
    return accepted(started, response)


@router.post("/{run}:verify", status_code=202, responses=problem_responses(404))
def verify_run(
    caller: Operator,
    root: RootName,
    run: RunName,
    plane: PlaneDependency,
    response: Response,
    body: VerifyRunRequest | None = None,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """The same for a run: its records, and every listed checkpoint, one after another.

    `result.records` tells what was found of the records: their number, everything that is not as it
    was written or does not fit, and folders of checkpoints that no record names.
    """
    steps = (body or VerifyRunRequest()).steps
    started = actions.verify_run(
        plane, caller, root, run, steps=steps, idempotency_key=idempotency_key
    )
    return accepted(started, response)


@router.post("/{run}:repair", responses=problem_responses(404, 409))
def repair_records(
    caller: Administrator,
    root: RootName,
    run: RunName,
    body: RepairRequest,
    plane: PlaneDependency,
) -> RepairReport:
    """Say what would mend the run's records, or with `dry_run: false` do it.

    Records are rebuilt from the others; what can't be is told, and stays as it is unless it is to
    be forgotten. What is replaced is kept below `damaged/`. Refused while a writer is alive.
    """
    return actions.repair_records(
        plane, caller, root, run, dry_run=body.dry_run, forget=body.forget
    )
