"""Comparing what is stored with what was saved."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.dependencies import IdempotencyKey, RootName, RunDependency
from cairn.service.http import problem_responses
from cairn.service.jobs import JobsDependency, StepDependency, accepted, verify
from cairn.service.schemas import Operation

router: Final = APIRouter(prefix="/roots/{root}/runs", tags=["jobs"])


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
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """The same for every listed checkpoint of a run, one after another."""
    request = verify.verify_request(root=root, run=run, step=None)
    return accepted(jobs.start(verify.KIND, request, idempotency_key=idempotency_key), response)
