"""Soft deletion of steps: a tombstone first, the bytes only after it has expired.

A tombstone is laid, then the aliases are read; a promotion moves its alias, then reads the
tombstones. So one of the two sees the other, and no alias ever names a step that goes. Removal
begins by marking the tombstone, by compare-and-swap against those who would lift it.
"""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import ClassVar, Final

from cairn.storage.errors import PreconditionFailedError, StepInUseError, StepNotFoundError
from cairn.storage.runs.layout import TRASH, parse_trash_file, trash_file
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store import (
    Clock,
    Moment,
    ObjectStore,
    Record,
    Versioned,
    from_rfc3339,
    rfc3339,
    utc_now,
)

__all__ = [
    "GRACE_SECONDS",
    "Tombstone",
    "begin_removal",
    "delete_step",
    "read_tombstones",
    "undelete_step",
]

GRACE_SECONDS: Final = 7 * 24 * 3600.0
"""How long a deleted step can be had back."""

StepKey = tuple[int, int]


class Tombstone(Record):
    """What `trash/<step>.<n>.json` says.

    Attributes:
        at: when the step was deleted, RFC 3339 in UTC.
        expires: from when on its bytes may go.
        by: who asked.
        reason: why.
        removing: its bytes are going; it can't be had back.
    """

    FORMAT: ClassVar[str] = "cairn.tombstone"

    at: Moment
    expires: Moment
    by: str = ""
    reason: str = ""
    removing: bool = False

    def has_expired(self, now: datetime) -> bool:
        """Whether the bytes may go."""
        return now >= from_rfc3339(self.expires)


def read_tombstones(objects: ObjectStore) -> dict[StepKey, Tombstone]:
    """The tombstone of every deleted step, by (step, attempt).

    Raises:
        UnsupportedFormatError, CorruptionError: one can't be read.
    """
    names = {
        name: key for name in objects.list(TRASH) if (key := parse_trash_file(name)) is not None
    }
    found = objects.parse_many(names, Tombstone.parse)
    return {names[name]: tombstone for name, tombstone in found.items()}


def delete_step(
    run: Run,
    info: StepInfo,
    *,
    by: str,
    reason: str = "",
    grace: float = GRACE_SECONDS,
    needed_by: Iterable[StepKey] = (),
    clock: Clock = utc_now,
) -> Tombstone:
    """Delete a step: it is listed no more, and its bytes go once the grace time is over.

    Deleting a deleted step gives the tombstone that it has.

    Args:
        run: the run.
        info: one of its steps.
        by: who asks.
        reason: why.
        grace: seconds during which it can be had back.
        needed_by: steps that stay and refer to its bytes.
        clock: tells the time.

    Raises:
        StepInUseError: aliases name the step, or other steps need its bytes; it stays as it was.
    """
    _refuse_in_use(run, info, needed_by)
    now = clock()
    tombstone = Tombstone(
        at=rfc3339(now), expires=rfc3339(now + timedelta(seconds=grace)), by=by, reason=reason
    )
    key = trash_file(info.step, info.attempt)
    try:
        generation = run.objects.write_if(
            key, tombstone.to_bytes(), generation=None, same_is_success=True
        )
    except PreconditionFailedError as exc:
        current = exc.current
        if not isinstance(current, Versioned):
            raise
        return Tombstone.parse(current.value, run.objects.uri / key)
    try:
        _refuse_in_use(run, info, ())  # promoted in between
    except StepInUseError:
        run.objects.delete_if(key, generation=generation)
        raise
    return tombstone


def undelete_step(run: Run, step: int, attempt: int) -> None:
    """Take a deletion back; the step is listed again if it counts.

    Raises:
        StepNotFoundError: the step is not deleted, or its bytes are going already.
    """
    key = trash_file(step, attempt)
    for _ in range(2):  # it can change once, when removal begins
        found = run.objects.read(key)
        if found is None:
            raise StepNotFoundError(
                "no such deleted step",
                path=run.uri / key,
                expected=f"a tombstone of step {step}, attempt {attempt}",
                found="none",
                next_step="See the run's steps: it was never deleted, or is gone.",
            )
        if Tombstone.parse(found.value, run.uri / key).removing:
            break
        try:
            run.objects.delete_if(key, generation=found.generation)
        except PreconditionFailedError:
            continue
        return
    raise StepNotFoundError(
        "too late to undelete",
        path=run.uri / key,
        expected="a step whose bytes are still there",
        found="a removal under way",
        next_step="Restore it from a fork or an export.",
    )


def begin_removal(run: Run, key: StepKey, *, now: datetime) -> bool:
    """Mark an expired tombstone, from when on the step can't be had back.

    Returns:
        False if the step stays: it was undeleted, has not expired, or an alias names it, in which
        case the tombstone is lifted.
    """
    name = trash_file(*key)
    found = run.objects.read(name)
    if found is None:
        return False
    tombstone = Tombstone.parse(found.value, run.uri / name)
    if tombstone.removing:
        return True
    if not tombstone.has_expired(now):
        return False
    try:
        if _aliases_of(run, *key):
            run.objects.delete_if(name, generation=found.generation)
            return False
        marked = tombstone.model_copy(update={"removing": True})
        run.objects.write_if(
            name, marked.to_bytes(), generation=found.generation, same_is_success=True
        )
    except PreconditionFailedError:
        return False  # undeleted meanwhile
    return True


def _refuse_in_use(run: Run, info: StepInfo, needed_by: Iterable[StepKey]) -> None:
    uses = [f"alias {name}" for name in _aliases_of(run, info.step, info.attempt)]
    uses += [f"step {step} of attempt {attempt}" for step, attempt in sorted(needed_by)]
    if uses:
        raise StepInUseError(
            "the step is in use",
            path=run.step_uri(info),
            expected="a step that nothing refers to",
            found=", ".join(uses),
            next_step="Move or delete the aliases, or delete those steps, first.",
        )


def _aliases_of(run: Run, step: int, attempt: int) -> list[str]:
    return [one.alias for one in run.aliases.list() if (one.step, one.attempt) == (step, attempt)]
