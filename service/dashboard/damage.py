"""Facts that pages show beside a damaged step: the job that found it, and the newest sound step."""

from cairn.service import actions
from cairn.service.access import Caller
from cairn.service.dashboard.asked import AskedOfRun, AskedOfStep
from cairn.service.errors import NotReadyError
from cairn.service.jobs import OperationNotFoundError
from cairn.service.routes import page_of_checkpoints
from cairn.service.schemas import Checkpoint, CheckpointState


def newest_sound(asked: AskedOfRun | AskedOfStep) -> Checkpoint | None:
    """Return the highest listed step of the run that is not damaged; None if there is none."""
    found = page_of_checkpoints(asked.plane, asked.root, asked.run, CheckpointState.LISTED, 1, None)
    return next(iter(found.checkpoints), None)


def known_job(
    asked: AskedOfRun | AskedOfStep, caller: Caller, checkpoint: Checkpoint
) -> str | None:
    """Return the id of the operation that found a step damaged, if this control plane has it."""
    if checkpoint.damaged is None or not checkpoint.damaged.job:
        return None
    try:
        return actions.get_operation(asked.plane, caller, checkpoint.damaged.job).id
    except (OperationNotFoundError, NotReadyError):
        return None
