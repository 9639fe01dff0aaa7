"""Export of a checkpoint in Hugging Face format."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.dependencies import IdempotencyKey, RootName, RunDependency
from cairn.service.http import StoreRoute, problem_responses
from cairn.service.jobs import (
    JobsDependency,
    StepDependency,
    accepted,
    convert,
    export_request,
    start_export,
)
from cairn.service.schemas import ConvertRequest, Operation

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["jobs"], route_class=StoreRoute
)


@router.post("/{step}:convert", status_code=202, responses=problem_responses(404, 409))
def convert_checkpoint(
    root: RootName,
    run: RunDependency,
    step: StepDependency,
    body: ConvertRequest,
    jobs: JobsDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start an export; its result names the artifact.

    The same export again is the same artifact, and the same operation: also once that has
    succeeded, for as long as its files are there. With a key it is an operation of its own.
    """
    options = convert.convert_options(body.dtype, body.max_shard_size)
    convert.check_convertible(run.manifest(step), options)
    request = export_request(
        convert.KIND,
        root=root,
        run=run,
        step=step,
        options=options,
        rule_version=convert.RULE_VERSION,
    )
    return accepted(start_export(jobs, run, request, idempotency_key=idempotency_key), response)
