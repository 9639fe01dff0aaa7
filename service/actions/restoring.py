"""Going back to a checkpoint: as a new run, or in its own."""

from cairn.service.access import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.starting import start
from cairn.service.errors import InvalidRequestError
from cairn.service.jobs import restore
from cairn.service.schemas import Operation, RestoreMode, RestoreRequest


def restore_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    wanted: RestoreRequest,
    *,
    idempotency_key: str | None,
) -> Operation:
    """Start a new run from the step (fork), or set the run's later steps aside (rollback).

    Raises:
        InvalidRequestError: A fork has no name, or a rollback has one.
        InvalidURIError: The new run's name leads out of the root.
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        NotReadyError, IdempotencyKeyReusedError: As `start`.
    """
    if (wanted.run is not None) != (wanted.mode is RestoreMode.FORK):
        raise InvalidRequestError(
            "body.run: expected the new run's name for mode fork, and none for mode rollback, "
            f"found {wanted.run!r} for mode {wanted.mode.value}"
        )
    if wanted.run is not None:
        plane.place(root, wanted.run)
    found = plane.run(root, run)
    request = restore.restore_request(
        root=root, run=found, step=found.step(step), mode=wanted.mode.value, target=wanted.run
    )
    return start(
        plane,
        caller,
        restore.KIND,
        request,
        action=f"checkpoint.{wanted.mode.value}",
        idempotency_key=idempotency_key,
    )
