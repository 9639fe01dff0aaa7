"""Return to a checkpoint: in a new run (fork), or in its own (rollback)."""

from collections.abc import Collection, Mapping
from typing import Any, Final

from cairn.service.access.callers import Caller
from cairn.service.actions.job_start import JobStart
from cairn.service.actions.operations import UNFINISHED
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.runs import get_run
from cairn.service.errors import (
    AliasesStrandedError,
    InvalidRequestError,
    PreconditionRequiredError,
    RunExistsError,
)
from cairn.service.filters.search import EVERYTHING
from cairn.service.http.preconditions import Seen
from cairn.service.jobs.kinds import restore
from cairn.service.schemas import Operation, RestoreMode, RestoreRequest
from cairn.storage.errors import PreconditionFailedError
from cairn.storage.runs.damage import refuse_damaged
from cairn.storage.runs.fork import refuse_taken
from cairn.storage.runs.rollback import stranded_aliases
from cairn.storage.runs.run import Run

_UNDER_WAY: Final = 1000  # largest number of operations to search for an equal one


def restore_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    body: RestoreRequest,
    *,
    seen: Seen | None,
    idempotency_key: str | None,
) -> Operation:
    """Start a new run from the step (fork), or supersede the run's later steps (rollback).

    Raises:
        InvalidRequestError: A fork has no name or has `strand`, or a rollback has a name.
        PreconditionRequiredError: A rollback without `seen`.
        ResourceChangedError: A rollback, and the run has changed since `seen`.
        AliasesStrandedError: A rollback would supersede steps that aliases outside `strand` name.
        InvalidURIError: The new run's name leads out of the root.
        RunExistsError: The store has something of the new run's name.
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        StepDamagedError: The step is damaged, and the request gives no reason to use it
            nonetheless.
        NotReadyError, IdempotencyKeyReusedError: See `JobStart`.
    """
    if (body.run is not None) != (body.mode is RestoreMode.FORK):
        needs = "a fork needs the name of the new run"
        if body.mode is RestoreMode.ROLLBACK:
            needs = f"a rollback stays in its run; leave {body.run!r} out"
        raise InvalidRequestError(f"body.run: {needs}")
    if body.strand and body.mode is RestoreMode.FORK:
        raise InvalidRequestError("body.strand: a fork strands no aliases; leave it out")
    target = None if body.run is None else plane.place(root, body.run)
    fields = {"root": root, "run": run, "step": step}
    fields |= {"mode": body.mode.value, "target": body.run}
    fields["despite_damage"] = body.despite_damage
    start = JobStart(
        plane, caller, root, restore.KIND, f"checkpoint.{body.mode.value}", idempotency_key
    )
    if operation := start.earlier_operation(fields):
        return operation
    stored_run = plane.run(root, run)
    info = stored_run.step(step)
    refuse_damaged(stored_run, info, despite_damage=body.despite_damage)
    request = restore.restore_request(
        root=root,
        run=stored_run,
        step=info,
        mode=body.mode.value,
        target=body.run,
        strand=body.strand,
        despite_damage=body.despite_damage,
    )
    if target is not None:
        try:
            refuse_taken(target)
        except PreconditionFailedError as exc:
            if not _is_repeated(start, request):  # a repeated request finds its own new run
                raise RunExistsError(str(exc)) from exc
    if target is None and not _is_repeated(start, request):
        if seen is None:
            raise PreconditionRequiredError(
                "A rollback needs If-Match with the ETag of the run as last seen (GET the run), or "
                "`If-Match: *` to go back whatever was saved since."
            )
        seen.require(get_run(plane, root, run, refresh=True))
        _refuse_stranded(stored_run, step, body.strand)
    return start.submit(request)


def _refuse_stranded(run: Run, step: int, accepted: Collection[str]) -> None:
    if stranded := stranded_aliases(run, step, accepted):
        names = ", ".join(f"{alias} (step {at})" for alias, at in stranded.items())
        raise AliasesStrandedError(
            f"Aliases point to steps after {step}: {names}. Promote another step first, or list in "
            "`strand` the aliases that may stay on a superseded step.",
            extra={"aliases": list(stranded)},
        )


def _is_repeated(start: JobStart, request: Mapping[str, Any]) -> bool:
    """Return whether an operation for this request exists already."""
    if start.idempotency_key is not None:
        return start.is_key_used()
    place = {"root": request["root"], "run": request["run"]}
    search = EVERYTHING.among(UNFINISHED).equal(kind=restore.KIND, **place)
    operations, _ = start.plane.jobs.list(search, limit=_UNDER_WAY)
    return any(operation.request == request for operation in operations)
