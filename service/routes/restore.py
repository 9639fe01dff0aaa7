"""Going back to a checkpoint: as a new run, or in its own."""

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from fastapi import APIRouter, Response

from cairn.service.dependencies import (
    IdempotencyKey,
    RootName,
    RunDependency,
    SettingsDependency,
    root_uri,
)
from cairn.service.errors import InvalidRequestError, RunExistsError
from cairn.service.http import StoreRoute, problem_responses
from cairn.service.jobs import (
    Jobs,
    JobsDependency,
    OperationNotFoundError,
    StepDependency,
    accepted,
    operation_id,
    restore,
)
from cairn.service.schemas import Operation, OperationState, RestoreMode, RestoreRequest
from cairn.storage.errors import PreconditionFailedError
from cairn.storage.runs import refuse_taken
from cairn.storage.store import confine

_UNDER_WAY: Final = 1000  # operations at most that are looked at for an equal one

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

    A rollback needs a run that nobody writes; a fork needs a name that is free, else it is refused
    at once: what the store has decides, whether the catalog knows it or not. What a fork results in
    says how many files and bytes of the copy were checked, and what was compared.
    """
    if (body.run is not None) != (body.mode is RestoreMode.FORK):
        raise InvalidRequestError(
            "body.run: expected the new run's name for mode fork, and none for mode rollback, "
            f"found {body.run!r} for mode {body.mode.value}"
        )
    request = restore.restore_request(
        root=root, run=run, step=step, mode=body.mode.value, target=body.run
    )
    if body.run is not None:
        target = confine(root_uri(settings, root), body.run)
        try:
            refuse_taken(target)
        except PreconditionFailedError as exc:
            if not _is_repeated(jobs, request, idempotency_key):  # then it is taken by itself
                raise RunExistsError(str(exc)) from exc
    return accepted(jobs.start(restore.KIND, request, idempotency_key=idempotency_key), response)


def _is_repeated(jobs: Jobs, request: Mapping[str, Any], idempotency_key: str | None) -> bool:
    """Whether an operation answers to the request already."""
    if idempotency_key is not None:
        with contextlib.suppress(OperationNotFoundError):
            jobs.get(operation_id(idempotency_key))
            return True
        return False
    return any(
        operation.kind == restore.KIND and operation.request == request
        for state in (OperationState.PENDING, OperationState.RUNNING)  # as they follow each other
        for operation in jobs.list(limit=_UNDER_WAY, state=state)
    )
