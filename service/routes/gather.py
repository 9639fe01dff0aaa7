"""A checkpoint as one safetensors file."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.dependencies import IdempotencyKey, RootName, RunDependency
from cairn.service.http import StoreRoute, problem_responses
from cairn.service.jobs import (
    JobsDependency,
    StepDependency,
    accepted,
    export_request,
    gather,
    start_export,
)
from cairn.service.schemas import GatherRequest, Operation

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["jobs"], route_class=StoreRoute
)


@router.post("/{step}:gather", status_code=202, responses=problem_responses(404, 409))
def gather_checkpoint(
    root: RootName,
    run: RunDependency,
    step: StepDependency,
    body: GatherRequest,
    jobs: JobsDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start gathering items of any checkpoint; the result names the artifact.

    The same again is the same artifact and operation, as with an export.
    """
    request = export_request(
        gather.KIND,
        root=root,
        run=run,
        step=step,
        options=gather.gather_options(run, step, body.items, body.dtype),
        rule_version=gather.RULE_VERSION,
    )
    return accepted(start_export(jobs, run, request, idempotency_key=idempotency_key), response)
