"""Deletion of a step, and its undoing."""

from cairn.service.access.callers import Caller
from cairn.service.actions.auditing import audited
from cairn.service.actions.listing import get_checkpoint
from cairn.service.actions.plane import ControlPlane
from cairn.service.catalog import rows
from cairn.service.catalog.events.lost_records import lost_tombstone
from cairn.service.errors import InvalidRequestError
from cairn.service.schemas import Checkpoint
from cairn.storage.errors import StepNotFoundError
from cairn.storage.runs.run import Run
from cairn.storage.runs.trash import deletable_step, delete_step, note_lifted, undelete_step


def delete_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    *,
    attempt: int | None,
    reason: str,
    grace: float,
) -> Checkpoint:
    """Delete a step; `undelete_checkpoint` restores it until the grace time is over.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        step: A listed or superseded step.
        attempt: Attempt that saved the step; None: the listed one.
        reason: Reason of the deletion.
        grace: Seconds during which the step can be undeleted.

    Raises:
        RunNotFoundError: There is no such run.
        StepNotFoundError: There is no such step, or it was deleted already.
        StepInFlightError: The step is being written.
        StepInUseError: An alias names it, the run's writer would resume from it, or a promotion or
            a rollback is about to use it.
    """
    found = plane.run(root, run)
    detail = {"step": step, "attempt": attempt, "reason": reason}
    with audited(plane, caller, "checkpoint.delete", root=root, run=run, **detail) as entry:
        info = deletable_step(found, step, attempt)
        tombstone = delete_step(found, info, by=caller.name, reason=reason, grace=grace)
        entry.complete(attempt=info.attempt, expires=tombstone.expires)
    return get_checkpoint(plane, root, run, info.step, attempt=info.attempt, refresh=True)


def undelete_checkpoint(
    plane: ControlPlane, caller: Caller, root: str, run: str, step: int, attempt: int | None
) -> Checkpoint:
    """Undelete a step, or keep a step listed whose tombstone the store has lost.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        step: A deleted step.
        attempt: Attempt to undelete, if several were deleted.

    Raises:
        RunNotFoundError: There is no such run.
        StepNotFoundError: The step is not deleted, or its files are being removed already.
        InvalidRequestError: Several attempts were deleted, and the request names none.
    """
    found = plane.run(root, run)
    detail = {"step": step, "attempt": attempt}
    with audited(plane, caller, "checkpoint.undelete", root=root, run=run, **detail) as entry:
        with plane.catalog.query() as connection:
            lost = rows.lost_deletions(connection, root, run, step)
        deleted = {number for saved, number in found.trashed() if saved == step}
        chosen = _deleted_attempt(found, step, attempt, sorted(deleted | lost.keys()))
        if chosen in deleted:
            undelete_step(found, step, chosen)
        else:
            note_lifted(found, (step, chosen), lost_tombstone(lost[chosen]))
        entry.complete(attempt=chosen)
    return get_checkpoint(plane, root, run, step, attempt=chosen, refresh=True)


def _deleted_attempt(run: Run, step: int, attempt: int | None, deleted: list[int]) -> int:
    if attempt is None and len(deleted) > 1:
        raise InvalidRequestError(
            f"body.attempt: expected one of {', '.join(map(str, deleted))}, since step {step} was "
            "saved and deleted more than once; found none"
        )
    if not deleted or (attempt is not None and attempt not in deleted):
        asked = f"step {step}" if attempt is None else f"step {step} of attempt {attempt}"
        held = run.step_attempts().get(step)
        known = [f"attempt {one} of it in the trash" for one in deleted]
        known += [] if held is None else [f"step {step} of attempt {held} listed"]
        raise StepNotFoundError(
            "no such deleted step",
            path=run.uri,
            expected=f"{asked} in the trash",
            found=", ".join(known) or "none",
            next_step="List the checkpoints with state trashed: what is not there was never "
            "deleted, or is gone for good.",
        )
    return deleted[0] if attempt is None else attempt
