"""Going back to a checkpoint: as a new run, or in its own."""

import contextlib
from collections.abc import Mapping
from typing import Any, Final

from cairn.service.access import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.starting import start
from cairn.service.errors import InvalidRequestError, RunExistsError
from cairn.service.jobs import Jobs, OperationNotFoundError, operation_id, restore
from cairn.service.schemas import Operation, OperationState, RestoreMode, RestoreRequest
from cairn.storage.errors import PreconditionFailedError
from cairn.storage.runs import refuse_taken

_UNDER_WAY: Final = 1000  # operations at most that are looked at for an equal one


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
        RunExistsError: There is something of that name, in the store.
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        NotReadyError, IdempotencyKeyReusedError: As `start`.
    """
    if (wanted.run is not None) != (wanted.mode is RestoreMode.FORK):
        raise InvalidRequestError(
            "body.run: expected the new run's name for mode fork, and none for mode rollback, "
            f"found {wanted.run!r} for mode {wanted.mode.value}"
        )
    target = None if wanted.run is None else plane.place(root, wanted.run)
    found = plane.run(root, run)
    request = restore.restore_request(
        root=root, run=found, step=found.step(step), mode=wanted.mode.value, target=wanted.run
    )
    if target is not None:
        try:
            refuse_taken(target)
        except PreconditionFailedError as exc:
            if not _is_repeated(plane.jobs, request, idempotency_key):  # then by itself
                raise RunExistsError(str(exc)) from exc
    return start(
        plane,
        caller,
        restore.KIND,
        request,
        action=f"checkpoint.{wanted.mode.value}",
        idempotency_key=idempotency_key,
    )


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
