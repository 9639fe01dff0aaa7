"""Deletes a step, unless an alias or the run's writer needs it, and takes deletions back."""

import contextlib
import logging
from collections.abc import Iterable

from cairn.service.errors import InvalidRequestError
from cairn.service.schemas import Deletion
from cairn.storage.errors import (
    CorruptionError,
    StepInFlightError,
    StepInUseError,
    StepNotFoundError,
    UnsupportedFormatError,
)
from cairn.storage.runs import (
    TRASH,
    Run,
    StepInfo,
    StepState,
    Tombstone,
    delete_step,
    manifest_file,
    parse_trash_file,
    read_lease,
    trash_file,
    undelete_step,
)
from cairn.storage.store import from_rfc3339, utc_now

logger = logging.getLogger(__name__)


def delete(
    run: Run, step: int, *, attempt: int | None, by: str, reason: str, grace: float
) -> tuple[StepInfo, Tombstone]:
    """Delete a step; `undelete` takes it back until the grace time is over.

    Nothing of the step is read, so that one whose manifest is damaged can be deleted too.

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
        StepInUseError: An alias names it, or the run's writer would resume from it.
    """
    info = _find(run, step, attempt)
    _refuse_writers_step(run, info)
    tombstone = delete_step(run, info, by=by, reason=reason, grace=grace)
    try:
        _refuse_writers_step(run, info)  # a writer came in between
    except StepInUseError:
        with contextlib.suppress(StepNotFoundError):
            undelete_step(run, info.step, info.attempt)
        raise
    return info, tombstone


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
    deleted = sorted(
        key[1]
        for name in run.objects.list(TRASH)
        if (key := parse_trash_file(name)) is not None and key[0] == step
    )
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
    found = run.objects.parse_many(names, _parse)
    return {names[name]: one for name, one in found.items() if one is not None}


def deletion_body(tombstone: Tombstone) -> Deletion:
    """A deletion as the API gives it out."""
    return Deletion(
        at=from_rfc3339(tombstone.at),
        expires=from_rfc3339(tombstone.expires),
        by=tombstone.by,
        reason=tombstone.reason,
        removing=tombstone.removing,
    )


def _parse(data: bytes, path: object) -> Tombstone | None:
    try:
        return Tombstone.parse(data, path)
    except (CorruptionError, UnsupportedFormatError) as exc:
        logger.warning("a deletion without its particulars: %s", exc)
        return None


def _find(run: Run, step: int, attempt: int | None) -> StepInfo:
    """The step to delete, told from names alone."""
    held = run.step_attempts().get(step)
    if attempt is None and held is None:
        return run.step(step)  # raises, unless it was published just now
    if held is not None and attempt in (None, held):
        return StepInfo(step, held, StepState.LISTED)
    assert attempt is not None
    deleted = run.objects.read(trash_file(step, attempt)) is not None
    if not deleted and run.objects.read(manifest_file(step, attempt)) is not None:
        return StepInfo(step, attempt, StepState.SET_ASIDE)
    found = [f"step {step} of attempt {held} listed"] if held is not None else []
    found += ["it in the trash already"] if deleted else []
    for info in run.unpublished():
        if info.step == step:
            if info.attempt == attempt and info.state is StepState.IN_FLIGHT:
                raise StepInFlightError(
                    "the step is being saved",
                    path=run.step_uri(info),
                    expected="a complete step",
                    found="a save in flight",
                    next_step="Try again once it is done.",
                )
            found.append(f"step {step} of attempt {info.attempt} {info.state.value}")
    raise StepNotFoundError(
        "no such step",
        path=run.uri,
        expected=f"step {step} of attempt {attempt}, with a manifest",
        found=", ".join(found) or "none",
        next_step="Choose a listed step, or one that was set aside; collecting garbage removes "
        "abandoned ones.",
    )


def _refuse_writers_step(run: Run, info: StepInfo) -> None:
    """Raise if the run has a live writer that would resume from the step."""
    lease = read_lease(run.objects)
    if info.state is not StepState.LISTED or lease is None or not lease.is_alive(utc_now()):
        return
    if any(step > info.step for step in run.step_attempts()):
        return
    for attempt in run.attempts():
        if attempt.number == lease.attempt != info.attempt and attempt.base_step < info.step:
            return  # it began without the step
    raise StepInUseError(
        "the step is in use",
        path=run.step_uri(info),
        expected="a step that nobody needs",
        found=f"the latest step of writer {lease.writer} (attempt {lease.attempt}), which holds "
        f"the run until {lease.expires}",
        next_step="Delete it once a later step is saved, or once that job has ended.",
    )
