"""Comparing what is stored with what was saved."""

from dataclasses import asdict
from typing import Final

from fastapi import APIRouter, Response

from cairn.service.catalog import note_deletion
from cairn.service.dependencies import (
    CatalogDependency,
    IdempotencyKey,
    RootName,
    RunDependency,
    RunName,
    SettingsDependency,
    existing_run,
)
from cairn.service.http import ActorDependency, StoreRoute, problem_responses
from cairn.service.jobs import JobsDependency, StepDependency, accepted, verify
from cairn.service.schemas import (
    Operation,
    Repair,
    RepairReport,
    RepairRequest,
    VerifyRunRequest,
)
from cairn.storage.runs import repair_run

router: Final = APIRouter(prefix="/roots/{root}/runs", tags=["jobs"], route_class=StoreRoute)


@router.post(
    "/{run}/checkpoints/{step}:verify", status_code=202, responses=problem_responses(404, 409)
)
def verify_checkpoint(
    root: RootName,
    run: RunDependency,
    step: StepDependency,
    jobs: JobsDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start reading every byte of a checkpoint, to compare it with its manifest.

    A sound checkpoint's operation succeeds; `result.steps` has what was read. A damaged one's fails
    with the problem `urn:cairn:problem:damaged`, whose `problems` name every file and leaf that is
    hit, and whose `steps` are those of a result.
    """
    request = verify.verify_request(root=root, run=run, step=step)
    return accepted(jobs.start(verify.KIND, request, idempotency_key=idempotency_key), response)


@router.post("/{run}:verify", status_code=202, responses=problem_responses(404))
def verify_run(
    root: RootName,
    run: RunDependency,
    jobs: JobsDependency,
    response: Response,
    body: VerifyRunRequest | None = None,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """The same for a run: its records, and every listed checkpoint, one after another.

    `result.records` tells what was found of the records: their number, everything that is not as it
    was written or does not fit, and folders of checkpoints that no record names.
    """
    steps = (body or VerifyRunRequest()).steps
    request = verify.verify_request(root=root, run=run, step=None, steps=steps)
    return accepted(jobs.start(verify.KIND, request, idempotency_key=idempotency_key), response)


@router.post("/{run}:repair", responses=problem_responses(404, 409))
def repair_records(
    root: RootName,
    run: RunName,
    body: RepairRequest,
    settings: SettingsDependency,
    actor: ActorDependency,
    catalog: CatalogDependency,
) -> RepairReport:
    """Say what would mend the run's records, or with `dry_run: false` do it.

    Records are rebuilt from the others; what can't be is told, and stays as it is unless it is to
    be forgotten. What is replaced is kept below `damaged/`. Refused while a writer is alive.
    """
    found = existing_run(settings, root, run)
    repairs = repair_run(found, by=actor, dry_run=body.dry_run, forget=body.forget)
    if not body.dry_run:
        done = {one.name: one.action for one in repairs if one.done}
        note_deletion(
            catalog, "run.repair", root=root, run=found, actor=actor, detail={"repairs": done}
        )
    return RepairReport(root=root, run=run, repairs=[Repair(**asdict(one)) for one in repairs])
