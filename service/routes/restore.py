"""Going back to a checkpoint: as a new run, or in its own."""

from typing import Final

from fastapi import APIRouter, Response

from cairn.service.dependencies import (
    IdempotencyKey,
    RootName,
    RunDependency,
    SettingsDependency,
    root_uri,
)
from cairn.service.errors import InvalidRequestError
from cairn.service.http import StoreRoute, problem_responses
from cairn.service.jobs import JobsDependency, StepDependency, accepted, restore
from cairn.service.schemas import Operation, RestoreMode, RestoreRequest
from cairn.storage.store import confine

router: Final = APIRouter(
    prefix="/roots/{root}/runs/{run}/checkpoints", tags=["jobs"], route_class=StoreRoute
)


@router.post("/{step}:restore", status_code=202, responses=problem_responses(404, 409))
def restore_checkpoint(
    root: RootName,
    run: RunDependency,
    step: StepDependency,
    body: RestoreRequest,
    settings: SettingsDependency,
    jobs: JobsDependency,
    response: Response,
    idempotency_key: IdempotencyKey = None,
) -> Operation:
    """Start a new run from the step (fork), or set the run's later steps aside (rollback).

    A rollback needs a run that nobody writes; a fork needs a name that is free. What a fork results
    in says how many files and bytes of the copy were checked, and what was compared.
    """
    if (body.run is not None) != (body.mode is RestoreMode.FORK):
        raise InvalidRequestError(
            "body.run: expected the new run's name for mode fork, and none for mode rollback, "
            f"found {body.run!r} for mode {body.mode.value}"
        )
    if body.run is not None:
        confine(root_uri(settings, root), body.run)
    request = restore.restore_request(
        root=root, run=run, step=step, mode=body.mode.value, target=body.run
    )
    return accepted(jobs.start(restore.KIND, request, idempotency_key=idempotency_key), response)
