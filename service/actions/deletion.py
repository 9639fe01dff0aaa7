"""Which step a deletion means, and a way back; deletions as the API gives them out."""

import logging
from collections.abc import Iterable

from cairn.service.errors import InvalidRequestError
from cairn.service.schemas import Deletion
from cairn.storage.errors import (
    StepNotFoundError,
)
from cairn.storage.runs import (
    Run,
    StepInfo,
    Tombstone,
    deletable_step,
    delete_step,
    judge_records,
    trash_file,
    undelete_step,
)
from cairn.storage.store import from_rfc3339

logger = logging.getLogger(__name__)


def delete(
    run: Run, step: int, *, attempt: int | None, by: str, reason: str, grace: float
) -> tuple[StepInfo, Tombstone]:
    """Delete a step; `undelete` takes it back until the grace time is over.

    Args:
        run: The run.
        step: A step that is listed, or was set aside.
        attempt: The attempt that saved it; None: the one that is listed.
        by: Who asks.
        reason: Why.
        grace: Seconds during which it can be had back.

    Raises:
        StepNotFoundError: There is no such step, or it was deleted already.
        StepInFlightError: It is being written.
        StepInUseError: An alias names it, the run's writer would resume from it, or somebody is
            about to promote it or to roll back to it.
    """
    info = deletable_step(run, step, attempt)
    return info, delete_step(run, info, by=by, reason=reason, grace=grace)


def undelete(run: Run, step: int, attempt: int | None) -> int:
    """Take a deletion back; the attempt whose step it was.

    Args:
        run: The run.
        step: A deleted step.
        attempt: Of several attempts at it that were deleted, this one.

    Raises:
        StepNotFoundError: It is not deleted, or its bytes are going already.
        InvalidRequestError: Several attempts at it were deleted, and none was named.
    """
    deleted = sorted(number for saved, number in run.trashed() if saved == step)
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
    chosen = deleted[0] if attempt is None else attempt
    undelete_step(run, step, chosen)
    return chosen


def read_deletions(run: Run, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Tombstone]:
    """The tombstones of these (step, attempt); one that can't be read is logged and left out."""
    names = {trash_file(*key): key for key in keys}
    found, unreadable = judge_records(run.objects, names, Tombstone.parse)
    for error in unreadable.values():
        logger.warning("a deletion without its particulars: %s", error)
    return {names[name]: one for name, one in found.items()}


def deletion_body(tombstone: Tombstone) -> Deletion:
    """A deletion as the API gives it out."""
    return Deletion(
        at=from_rfc3339(tombstone.at),
        expires=from_rfc3339(tombstone.expires),
        by=tombstone.by,
        reason=tombstone.reason,
        removing=tombstone.removing,
    )
