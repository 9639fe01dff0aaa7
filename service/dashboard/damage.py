"""Facts that pages show beside a damaged step: the job that found it, and the newest sound step."""

from cairn.service.access.callers import Caller
from cairn.service.actions import operations
from cairn.service.dashboard.requests import RunRequest, StepRequest
from cairn.service.errors import NotReadyError
from cairn.service.jobs.errors import OperationNotFoundError
from cairn.service.routes.checkpoints import page_of_checkpoints
from cairn.service.schemas import Checkpoint, CheckpointState


def newest_sound(request: RunRequest | StepRequest) -> Checkpoint | None:
    """Return the highest listed step of the run that is not damaged; None if there is none."""
    newest = page_of_checkpoints(
        request.plane, request.root, request.run, CheckpointState.LISTED, 1, None
    )
    return next(iter(newest.checkpoints), None)


def damage_job(
    request: RunRequest | StepRequest, caller: Caller, checkpoint: Checkpoint
) -> str | None:
    """Return the id of the operation that found a step damaged.

    None if the step is not damaged, or if this control plane does not have the operation.
    """
    if checkpoint.damaged is None or not checkpoint.damaged.job:
        return None
    try:
        return operations.get_operation(request.plane, caller, checkpoint.damaged.job).id
    except (OperationNotFoundError, NotReadyError):
        return None
