"""Verification of checkpoints and runs, and repair of a run's records."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.access.permission import Administrator, Operator
from cairn.service.actions import verify
from cairn.service.dependencies import (
    IdempotencyKey,
    PlaneDependency,
    RootName,
    RunName,
    StepNumber,
)
from cairn.service.http.answers import accepted
from cairn.service.http.limited_routes import StoreRoute
from cairn.service.http.problems import problem_responses
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
    """Start to read every byte of a checkpoint and compare it with its manifest.

    If the checkpoint is sound, the operation succeeds, and `result.steps` says what was read. If it
    is damaged, the operation fails with the problem `urn:cairn:problem:damaged`: `problems` names
    every damaged file and leaf, and `steps` has the same content as in a result. The checkpoint
    then stays `damaged` until a verification of it succeeds. A failed verification can't be
    resumed; start a new one.
    """
    started = verify.verify_checkpoint(
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
    """Start to verify a run: its records, then its listed checkpoints one after another.

    `result.records` describes the records: their number, every record that has changed since it was
    written or does not fit the others, and checkpoint folders that no record names.
    """
    steps = (body or VerifyRunRequest()).steps
    started = verify.verify_run(
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
    """Plan a repair of the run's records, or with `dry_run: false` carry it out.

    Damaged records are rebuilt from the others. Records that can't be rebuilt are reported; they
    stay as they are unless `forget` names them. Replaced records are kept below `damaged/`. The
    request is refused while a writer is alive.
    """
    return verify.repair_records(plane, caller, root, run, dry_run=body.dry_run, forget=body.forget)
