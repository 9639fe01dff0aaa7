"""Attempts at a run, and the rule for which of its steps count.

Every start, takeover, rollback or overwrite creates the next numbered attempt. Its number is the
fencing token; its `base_step` is the last step that it keeps. A step (s, n) counts only if no later
attempt has base_step < s, and no later attempt overwrote an earlier step s' < s (overwriting a step
supersedes the steps after it). Readers apply this rule to the store's records alone. So if a paused
writer wakes up after a takeover, the steps that it writes are not listed; and an overwrite takes
effect at once, by its manifest.

An overwrite keeps all steps until it is published. The overwrite of a writer that was paused could
therefore appear between steps that others saved meanwhile. It does not count if the next attempt
has begun from a step that it would have replaced: when that attempt began, the overwrite had not
been published.

Every attempt names the attempt before it, with its base step, and the lease names the newest
attempt. So readers notice an attempt's record that is lost, damaged or replaced by another record,
and still know its base step. An attempt also names (step, attempt) of the step that it keeps, and
the step that it was begun to overwrite. So an overwritten step is not listed again if the manifest
of the overwrite is lost.
"""

import secrets
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field

from cairn.storage.errors import (
    CorruptionError,
    FencedError,
    PreconditionFailedError,
    StorageError,
)
from cairn.storage.runs.records.layout import (
    ATTEMPTS,
    MANIFESTS,
    MAX_NUMBER,
    RUN_FILE,
    TRASH,
    attempt_file,
    parse_attempt_file,
    parse_manifest_file,
    parse_trash_file,
)
from cairn.storage.runs.records.placed import (
    UNREADABLE,
    judge_records,
    parse_record,
    read_record,
    write_record,
)
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.records import Record

__all__ = [
    "Attempt",
    "AttemptRecord",
    "AttemptsFound",
    "Begun",
    "Kept",
    "counting",
    "create_attempt",
    "ensure_newest",
    "find_superseded",
    "free_number",
    "highest_number",
    "is_begun",
    "judge_attempts",
    "list_attempts",
    "newest_number",
    "run_removed",
    "saved_steps",
    "told_steps",
]


Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]

Begun = tuple[Number, Annotated[int, Field(ge=-1, le=MAX_NUMBER)]]
"""(number, base step) of an attempt."""

Kept = int | tuple[int, int]
"""Last step that an attempt keeps: (step, attempt), or the step number alone; -1 for none."""


@dataclass(frozen=True)
class Attempt:
    """Numbered attempt at writing the run.

    Attributes:
        number: 1, 2, 3, …; the fencing token.
        base_step: the last step of earlier attempts that it keeps; -1 keeps none.
        writer: id of the writer.
        at: time of its begin, RFC 3339 in UTC.
        instance: id of the process that writes it, which only that process knows.
        previous: (number, base step) of the attempt before it, (0, -1) if it is the first; None:
            unknown.
        base_attempt: the attempt that wrote the base step; None: unknown.
        overwrites: the step that it was begun to overwrite, and which it saves first; None: none.
    """

    number: int
    base_step: int
    writer: str
    at: str
    instance: str = field(default="", compare=False)
    previous: Begun | None = field(default=None, compare=False)
    base_attempt: int | None = field(default=None, compare=False)
    overwrites: int | None = field(default=None, compare=False)


class AttemptRecord(Record):
    """Content of `attempts/<n>.json`; the other attributes are as in `Attempt`.

    Attributes:
        token: unique text of this write, by which a writer recognizes its own record after it
            repeated a request.
    """

    FORMAT: ClassVar[str] = "cairn.attempt"

    base_step: Annotated[int, Field(ge=-1, le=MAX_NUMBER)]
    writer: str
    at: str
    previous: Begun | None = Field(default=None, exclude_if=lambda field: field is None)
    base_attempt: Number | None = Field(default=None, exclude_if=lambda field: field is None)
    overwrites: Number | None = Field(default=None, exclude_if=lambda field: field is None)
    token: str = Field(default="", exclude_if=lambda field: not field)

    def of_number(self, number: int) -> Attempt:
        """Return the attempt with this record; its number, from the record's name, is `number`."""
        return Attempt(
            number,
            self.base_step,
            self.writer,
            self.at,
            previous=self.previous,
            base_attempt=self.base_attempt,
            overwrites=self.overwrites,
        )


class AttemptsFound(NamedTuple):
    """Attempts of a run, as far as records show them.

    Attributes:
        known: every attempt whose base step is known, by number. If its own record can't be read,
            the next attempt or the lease names the base step.
        unknown: numbers of the attempts whose base step no record names.
        problems: errors of records, by the record's name.
    """

    known: list[Attempt]
    unknown: list[int]
    problems: dict[str, StorageError]


def counting(saved: Iterable[tuple[int, int]], attempts: Iterable[Attempt]) -> dict[int, int]:
    """Return the steps that count, in ascending order -> the attempt that holds each of them.

    Args:
        saved: (step, attempt) of every manifest and every tombstone. Tombstones are included
            because deleting a step must not bring back what it had overwritten.
        attempts: every attempt of the run.
    """
    saved = list(saved)
    is_superseded = find_superseded(attempts, saved)
    holders: dict[int, int] = {}
    for step, attempt in saved:
        if not is_superseded(step, attempt):
            holders[step] = max(attempt, holders.get(step, attempt))
    return dict(sorted(holders.items()))


def find_superseded(
    attempts: Iterable[Attempt], saved: Iterable[tuple[int, int]]
) -> Callable[[int, int], bool]:
    """Return a function of (step, attempt) that is True if a later attempt superseded the step.

    Args:
        attempts: every attempt of the run.
        saved: (step, attempt) of manifests and tombstones, including those of overwrites.
    """
    ordered = sorted(attempts, key=_number)
    too_late = {
        attempt.number for attempt, after in pairwise(ordered) if _came_too_late(attempt, after)
    }
    # An attempt saves the step that it was begun to overwrite first: if it has saved any step,
    # the overwrite is published.
    savers = {attempt for _, attempt in saved} - too_late
    numbers = [attempt.number for attempt in ordered]
    lowest_from: list[int] = []
    # lowest_from[i]: the lowest of the last kept steps of the attempts from i on.
    for attempt in reversed(ordered):
        last = _last_kept(attempt, has_saved=attempt.number in savers)
        lowest_from.append(min([last, *lowest_from[-1:]]))
    lowest_from.reverse()

    def is_superseded(step: int, attempt: int) -> bool:
        later = bisect_right(numbers, attempt)
        return attempt in too_late or (later < len(numbers) and lowest_from[later] < step)

    return is_superseded


def _last_kept(attempt: Attempt, *, has_saved: bool) -> int:
    """Return the last step of earlier attempts that an attempt keeps at present."""
    if attempt.overwrites is None or not has_saved:
        return attempt.base_step
    return min(attempt.base_step, attempt.overwrites)


def _came_too_late(attempt: Attempt, after: Attempt) -> bool:
    """Return True if the next attempt, `after`, keeps a step that `attempt` was to overwrite."""
    if attempt.overwrites is None or after.base_attempt is None:
        return False
    return after.base_attempt < attempt.number and after.base_step >= attempt.overwrites


def told_steps(
    attempts: Iterable[Attempt], published: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return (step, attempt) of the steps that were published, as attempts' records prove.

    Args:
        attempts: attempts of the run, by number.
        published: (step, attempt) of other steps that were published. If one is of an attempt that
            was begun to overwrite a step, that overwrite was published too, since it is saved
            first.
    """
    attempts = list(attempts)
    saved = {
        (attempt.base_step, attempt.base_attempt)
        for attempt in attempts
        if attempt.base_attempt is not None
    }
    # The record of the second attempt is lost: its base step is the step that the first attempt
    # had overwritten.
    saved.update(
        (before.overwrites, before.number)
        for before, after in pairwise(attempts)
        if after.base_attempt is None and before.overwrites == after.base_step
    )
    first = {
        attempt.number: attempt.overwrites for attempt in attempts if attempt.overwrites is not None
    }
    done = {number for step, number in (*saved, *published) if step >= first.get(number, step + 1)}
    return saved.union((first[number], number) for number in done)


def list_attempts(
    objects: ObjectStore,
    newest: Begun | None = None,
    saved: Collection[tuple[int, int]] = (),
) -> list[Attempt]:
    """Return every attempt of the run, by number.

    Args:
        objects: the run's objects.
        newest: as in `judge_attempts`.
        saved: as in `judge_attempts`.

    Raises:
        UnsupportedFormatError, CorruptionError: an attempt's record can't be read, is of another
            place or is missing, so that nothing decides which steps count.
    """
    judged = judge_attempts(objects, newest, saved)
    for error in judged.problems.values():
        raise error
    return judged.known


def judge_attempts(
    objects: ObjectStore,
    newest: Begun | None = None,
    saved: Collection[tuple[int, int]] = (),
    listed: Iterable[str] | None = None,
) -> AttemptsFound:
    """Return every attempt of the run, and the errors of lost or damaged records.

    Args:
        objects: the run's objects.
        newest: the newest attempt according to a lease read earlier; it must exist.
        saved: (step, attempt) of manifests and tombstones; their attempts must exist.
        listed: names in the folder of attempts, if the caller has just listed it; None: it is
            listed.
    """
    names = {
        name: number
        for name in (objects.children(ATTEMPTS) if listed is None else listed)
        if (number := parse_attempt_file(name)) is not None
    }
    records, problems = judge_records(objects, names, AttemptRecord.parse)
    attempts = {names[name]: record.of_number(names[name]) for name, record in records.items()}
    base_steps = dict(
        attempt.previous for attempt in attempts.values() if attempt.previous is not None
    )
    base_steps.update([] if newest is None else [newest])
    steps = {number: step for step, number in saved}
    for number in sorted({*base_steps, *steps} - attempts.keys() - {0}):
        name = attempt_file(number)
        # Read it by name before calling it lost: a store's listing may be stale.
        stored = None if name in problems else objects.read(name)
        try:
            if stored is not None:
                record = parse_record(objects, name, AttemptRecord, stored)
                attempts[number] = record.of_number(number)
            elif name not in problems:
                problems[name] = _lost(objects, number, steps.get(number))
        except UNREADABLE as exc:
            problems[name] = exc
        # The next attempt or the lease names its base step, which is enough to decide.
        if number in base_steps:
            attempts.setdefault(number, Attempt(number, base_steps[number], writer="", at=""))
    numbers = {number for number in steps if attempt_file(number) in problems}
    numbers.update(number for name, number in names.items() if name in problems)
    unknown = numbers.difference(attempts)
    return AttemptsFound(sorted(attempts.values(), key=_number), sorted(unknown), problems)


def _number(attempt: Attempt) -> int:
    return attempt.number


def _lost(objects: ObjectStore, number: int, step: int | None) -> CorruptionError:
    saved = "" if step is None else f", and step {step} of attempt {number}"
    return CorruptionError(
        "the record of an attempt is lost",
        path=objects.uri / attempt_file(number),
        expected="a record that others name",
        found=f"none{saved}",
        next_step="Restore it from a backup, or see what `cairn repair` can do.",
    )


def create_attempt(objects: ObjectStore, attempt: Attempt) -> Attempt | None:
    """Create the attempt's record and return the attempt; None if the number is in use.

    Only the holder of the lease may call this; see
    `cairn.storage.runs.lease.begin_attempt`.
    """
    record = AttemptRecord(
        base_step=attempt.base_step,
        writer=attempt.writer,
        at=attempt.at,
        previous=attempt.previous,
        base_attempt=attempt.base_attempt,
        overwrites=attempt.overwrites,
        token=secrets.token_hex(8),
    )
    try:
        # Created only if absent: two starts never get the same fencing token.
        write_record(objects, attempt_file(attempt.number), record, generation=None)
    except PreconditionFailedError:
        return None
    return attempt


def ensure_newest(objects: ObjectStore, attempt: Attempt) -> None:
    """Raise FencedError unless `attempt` is the run's newest. Call this right before publishing.

    Raises:
        FencedError: a later attempt exists, or this attempt's record is gone because the run was
            removed.
    """
    newest, is_there = objects.gather(
        lambda: newest_number(objects), lambda: is_begun(objects, attempt)
    )
    if newest > attempt.number:
        raise FencedError(
            "this writer was replaced",
            path=objects.uri,
            expected=f"attempt {attempt.number} of {attempt.writer} to be the newest",
            found=f"attempt {newest}",
            next_step="Stop this process, or begin a new attempt from the latest step.",
        )
    if not is_there:
        raise run_removed(objects, attempt)


def run_removed(objects: ObjectStore, attempt: Attempt) -> FencedError:
    """Return the error for the writer of `attempt` after the run was removed or replaced."""
    return FencedError(
        "the run was removed",
        path=objects.uri / attempt_file(attempt.number),
        expected=f"{RUN_FILE}, and the record of attempt {attempt.number}, which "
        f"{attempt.writer} writes",
        found="none, or another's",
        next_step="Stop this process, or begin the run anew; nothing that this attempt saves "
        "from now on is listed.",
    )


def is_begun(objects: ObjectStore, attempt: Attempt) -> bool:
    """Return True if the run and the attempt's record still exist and were not replaced."""
    run, stored = objects.gather(
        lambda: objects.read(RUN_FILE),
        lambda: read_record(objects, attempt_file(attempt.number), AttemptRecord),
    )
    if run is None or stored is None:
        return False
    record, _ = stored
    own = attempt.base_step, attempt.writer, attempt.at
    return (record.base_step, record.writer, record.at) == own


def free_number(objects: ObjectStore, saved: Iterable[tuple[int, int]]) -> int:
    """Return the number for the next attempt; another process may use it first.

    Args:
        objects: the run's objects.
        saved: (step, attempt) of manifests and tombstones. The numbers of these attempts are in use
            even if the attempts' records are lost.
    """
    savers = (attempt for _, attempt in saved)
    return max(highest_number(*objects.entries(ATTEMPTS)), *savers, 0) + 1


def saved_steps(objects: ObjectStore) -> list[tuple[int, int]]:
    """Return (step, attempt) of every manifest and tombstone; only names are read."""
    manifests, trash = objects.gather(lambda: objects.list(MANIFESTS), lambda: objects.list(TRASH))
    keys = [*map(parse_manifest_file, manifests), *map(parse_trash_file, trash)]
    return [key for key in keys if key is not None]


def highest_number(files: Iterable[str], folders: Iterable[str]) -> int:
    """Return the highest number in use below the folder of attempts.

    Args:
        files: names of the files in that folder.
        folders: names of the folders in it. A number is in use even if a person created its folder.
    """
    return max(_highest(files), _highest(f"{folder}.json" for folder in folders))


def newest_number(objects: ObjectStore) -> int:
    """Return the number of the newest attempt; 0 if there is none."""
    return _highest(objects.children(ATTEMPTS))


def _highest(names: Iterable[str]) -> int:
    numbers = (parse_attempt_file(name) for name in names)
    return max((number for number in numbers if number is not None), default=0)
