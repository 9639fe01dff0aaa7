"""Which attempts at a run there are, and which of its steps count.

Every start, takeover, rollback or overwrite creates the next numbered attempt; its number is the
fencing token, its `base_step` is the last step it keeps. A step (s, n) counts only if no later
attempt has base_step < s, nor has published the step s' < s that it was begun to overwrite. This is
judged at read time from the store alone, so a writer that was paused and wakes up after a takeover
writes where nobody looks, and an overwrite is one event: its manifest.

An overwrite keeps all steps until it is published, so that of a writer that was paused could come
between steps that others saved meanwhile. It does not count if the attempt after it has begun from
a step that it would have replaced: when that began, it had not been published.

Every attempt names the one before it, with its base step, and the lease names the newest: a record
that is lost, damaged or in another's place is missed, and what it said is known all the same. It
names the step that it keeps as well, with its attempt, and the one that it was begun to overwrite:
a manifest that is lost does not give its place back to what it had overwritten.
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
from cairn.storage.store import ObjectStore, Record

__all__ = [
    "Attempt",
    "AttemptRecord",
    "AttemptsFound",
    "Begun",
    "Kept",
    "counting",
    "create_attempt",
    "ensure_newest",
    "free_number",
    "highest_number",
    "is_begun",
    "judge_attempts",
    "list_attempts",
    "newest_number",
    "run_removed",
    "saved_steps",
    "set_aside",
    "told_steps",
]


Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]

Begun = tuple[Number, Annotated[int, Field(ge=-1, le=MAX_NUMBER)]]
"""(number, base step) of an attempt."""

Kept = int | tuple[int, int]
"""The last step that an attempt keeps: (step, attempt), or its number alone; -1 for none."""


@dataclass(frozen=True)
class Attempt:
    """One numbered attempt at writing the run.

    Attributes:
        number: 1, 2, 3, …; the fencing token.
        base_step: the last step of earlier attempts that it keeps; -1 keeps none.
        writer: id of the writer.
        at: when it began, RFC 3339 in UTC.
        instance: of the process that writes it; known to that process alone.
        previous: the attempt before it, (0, -1) if it is the first; None: not known.
        base_attempt: which attempt had written the base step; None: not known.
        overwrites: the step that it was begun to overwrite, which it saves first; None: it was not.
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
    """What `attempts/<n>.json` says; attributes as of `Attempt`.

    Attributes:
        token: unique to this write, so that a repeated request can tell its own from another's.
    """

    FORMAT: ClassVar[str] = "cairn.attempt"

    base_step: Annotated[int, Field(ge=-1, le=MAX_NUMBER)]
    writer: str
    at: str
    previous: Begun | None = Field(default=None, exclude_if=lambda one: one is None)
    base_attempt: Number | None = Field(default=None, exclude_if=lambda one: one is None)
    overwrites: Number | None = Field(default=None, exclude_if=lambda one: one is None)
    token: str = Field(default="", exclude_if=lambda one: not one)

    def of_number(self, number: int) -> Attempt:
        """The attempt that has this record."""
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
    """The attempts of a run, as far as they are known.

    Attributes:
        known: every attempt whose base step is known, by number; of one whose record can't be
            read, as the one after it or the lease tells it.
        unknown: numbers of those whose base step nothing tells.
        problems: what is wrong with records, by name.
    """

    known: list[Attempt]
    unknown: list[int]
    problems: dict[str, StorageError]


def counting(saved: Iterable[tuple[int, int]], attempts: Iterable[Attempt]) -> dict[int, int]:
    """Which attempt holds each step that counts, by step in ascending order.

    Args:
        saved: (step, attempt) of every manifest and of every tombstone: a step that was deleted
            does not give its place back to what it had overwritten.
        attempts: every attempt of the run.
    """
    saved = list(saved)
    is_aside = set_aside(attempts, saved)
    held: dict[int, int] = {}
    for step, attempt in saved:
        if not is_aside(step, attempt):
            held[step] = max(attempt, held.get(step, attempt))
    return dict(sorted(held.items()))


def set_aside(
    attempts: Iterable[Attempt], saved: Iterable[tuple[int, int]]
) -> Callable[[int, int], bool]:
    """A function of (step, attempt): True if a later attempt went back before that step.

    Args:
        attempts: of the run.
        saved: (step, attempt) of manifests and tombstones, those of overwrites among them.
    """
    ordered = sorted(attempts, key=_number)
    too_late = {one.number for one, after in pairwise(ordered) if _came_too_late(one, after)}
    # An attempt saves nothing before the step that it was begun to overwrite.
    savers = {attempt for _, attempt in saved} - too_late
    numbers = [one.number for one in ordered]
    lowest_from: list[int] = []
    for one in reversed(ordered):
        last = _last_kept(one, has_saved=one.number in savers)
        lowest_from.append(min([last, *lowest_from[-1:]]))
    lowest_from.reverse()

    def is_aside(step: int, attempt: int) -> bool:
        later = bisect_right(numbers, attempt)
        return attempt in too_late or (later < len(numbers) and lowest_from[later] < step)

    return is_aside


def _last_kept(one: Attempt, *, has_saved: bool) -> int:
    """The last step of earlier attempts that an attempt keeps by now."""
    if one.overwrites is None or not has_saved:
        return one.base_step
    return min(one.base_step, one.overwrites)


def _came_too_late(one: Attempt, after: Attempt) -> bool:
    """Whether the next attempt keeps a step that `one` would have overwritten by then."""
    if one.overwrites is None or after.base_attempt is None:
        return False
    return after.base_attempt < one.number and after.base_step >= one.overwrites


def told_steps(
    attempts: Iterable[Attempt], known: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """(step, attempt) of steps that were published once, as attempts tell.

    Args:
        attempts: of the run, by number.
        known: (step, attempt) of others that were published: an attempt saves nothing before the
            step that it was begun to overwrite.
    """
    attempts = list(attempts)
    told = {(one.base_step, one.base_attempt) for one in attempts if one.base_attempt is not None}
    # The record of the second is lost: what it went back to is what the first had overwritten.
    told.update(
        (before.overwrites, before.number)
        for before, one in pairwise(attempts)
        if one.base_attempt is None and before.overwrites == one.base_step
    )
    first = {one.number: one.overwrites for one in attempts if one.overwrites is not None}
    done = {number for step, number in (*told, *known) if step >= first.get(number, step + 1)}
    return told.union((first[number], number) for number in done)


def list_attempts(
    objects: ObjectStore,
    newest: Begun | None = None,
    saved: Collection[tuple[int, int]] = (),
) -> list[Attempt]:
    """Every attempt of the run, by number.

    Args:
        objects: the run's objects.
        newest: as in `judge_attempts`.
        saved: as there.

    Raises:
        UnsupportedFormatError, CorruptionError: an attempt's record can't be read, belongs
            elsewhere or is missing; what counts could be judged by guess only.
    """
    found = judge_attempts(objects, newest, saved)
    for error in found.problems.values():
        raise error
    return found.known


def judge_attempts(
    objects: ObjectStore,
    newest: Begun | None = None,
    saved: Collection[tuple[int, int]] = (),
    listed: Iterable[str] | None = None,
) -> AttemptsFound:
    """Every attempt of the run, also where records are lost or damaged.

    Args:
        objects: the run's objects.
        newest: the newest attempt, if the lease told before; it must be there.
        saved: (step, attempt) of manifests and tombstones; their attempts must be there.
        listed: names of what is in their folder, if it has been listed just now.
    """
    names = {
        name: number
        for name in (objects.children(ATTEMPTS) if listed is None else listed)
        if (number := parse_attempt_file(name)) is not None
    }
    records, problems = judge_records(objects, names, AttemptRecord.parse)
    known = {names[name]: record.of_number(names[name]) for name, record in records.items()}
    told = dict(one.previous for one in known.values() if one.previous is not None)
    told.update([] if newest is None else [newest])
    steps = {number: step for step, number in saved}
    for number in sorted({*told, *steps} - known.keys() - {0}):
        name = attempt_file(number)
        # By its name: a store may show an old list.
        found = None if name in problems else objects.read(name)
        try:
            if found is not None:
                record = parse_record(objects, name, AttemptRecord, found)
                known[number] = record.of_number(number)
            elif name not in problems:
                problems[name] = _lost(objects, number, steps.get(number))
        except UNREADABLE as exc:
            problems[name] = exc
        if number in told:
            known.setdefault(number, Attempt(number, told[number], writer="", at=""))
    numbers = {number for number in steps if attempt_file(number) in problems}
    numbers.update(number for name, number in names.items() if name in problems)
    unknown = numbers.difference(known)
    return AttemptsFound(sorted(known.values(), key=_number), sorted(unknown), problems)


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
    """`attempt`, now that it exists; None if its number was taken.

    Only for who holds the lease, see `cairn.storage.runs.records.lease.begin_attempt`.
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
        write_record(objects, attempt_file(attempt.number), record, generation=None)
    except PreconditionFailedError:
        return None
    return attempt


def ensure_newest(objects: ObjectStore, attempt: Attempt) -> None:
    """Do nothing if `attempt` is the run's newest. Call before publishing a step.

    Raises:
        FencedError: a later attempt exists, or this one does not any more: the run was removed.
    """
    newest, is_there = objects.at_once(
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
    """The error of who writes `attempt`, if that `is_begun` no more."""
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
    """Whether the run and the attempt's record are there still, and no others in their place."""
    run, stored = objects.at_once(
        lambda: objects.read(RUN_FILE),
        lambda: read_record(objects, attempt_file(attempt.number), AttemptRecord),
    )
    if run is None or stored is None:
        return False
    record, _ = stored
    own = attempt.base_step, attempt.writer, attempt.at
    return (record.base_step, record.writer, record.at) == own


def free_number(objects: ObjectStore, saved: Iterable[tuple[int, int]]) -> int:
    """The number of the next attempt, if nobody else takes it.

    Args:
        objects: the run's objects.
        saved: (step, attempt) of manifests and tombstones: the record of an attempt may be lost.
    """
    savers = (attempt for _, attempt in saved)
    return max(highest_number(*objects.entries(ATTEMPTS)), *savers, 0) + 1


def saved_steps(objects: ObjectStore) -> list[tuple[int, int]]:
    """(step, attempt) of every manifest and of every tombstone; from names alone."""
    manifests, trash = objects.at_once(lambda: objects.list(MANIFESTS), lambda: objects.list(TRASH))
    keys = [*map(parse_manifest_file, manifests), *map(parse_trash_file, trash)]
    return [key for key in keys if key is not None]


def highest_number(files: Iterable[str], folders: Iterable[str]) -> int:
    """The highest number that is in use below their folder.

    Args:
        files: names of what is there.
        folders: names of the folders there: one that was put there by hand must not be written
            into either.
    """
    return max(_highest(files), _highest(f"{folder}.json" for folder in folders))


def newest_number(objects: ObjectStore) -> int:
    """The number of the newest attempt; 0 if there is none."""
    return _highest(objects.children(ATTEMPTS))


def _highest(names: Iterable[str]) -> int:
    numbers = (parse_attempt_file(name) for name in names)
    return max((number for number in numbers if number is not None), default=0)
