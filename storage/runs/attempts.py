"""Which attempts at a run there are, and which of its steps count.

Every start, takeover, rollback or overwrite creates the next numbered attempt; its number is the
fencing token, its `base_step` is the last step it keeps. A step (s, n) counts only if no later
attempt has base_step < s. This is judged at read time from the store alone, so a writer that was
paused and wakes up after a takeover writes where nobody looks.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from pydantic import Field

from cairn.storage.errors import FencedError, PreconditionFailedError
from cairn.storage.runs.layout import ATTEMPTS, MAX_NUMBER, attempt_file, parse_attempt_file
from cairn.storage.store import ObjectStore, Record

__all__ = [
    "Attempt",
    "counting",
    "create_attempt",
    "ensure_newest",
    "free_number",
    "list_attempts",
    "newest_number",
    "set_aside",
]


@dataclass(frozen=True)
class Attempt:
    """One numbered attempt at writing the run.

    Attributes:
        number: 1, 2, 3, …; the fencing token.
        base_step: the last step of earlier attempts that it keeps; -1 keeps none.
        writer: id of the writer.
        at: when it began, RFC 3339 in UTC.
        instance: of the process that writes it; known to that process alone.
    """

    number: int
    base_step: int
    writer: str
    at: str
    instance: str = field(default="", compare=False)


class _AttemptRecord(Record):
    FORMAT: ClassVar[str] = "cairn.attempt"

    base_step: Annotated[int, Field(ge=-1, le=MAX_NUMBER)]
    writer: str
    at: str


def counting(saved: Iterable[tuple[int, int]], attempts: Iterable[Attempt]) -> dict[int, int]:
    """Which attempt holds each step that counts, by step in ascending order.

    Args:
        saved: (step, attempt) of every manifest and of every tombstone: a step that was deleted
            does not give its place back to what it had overwritten.
        attempts: every attempt of the run.
    """
    is_aside = set_aside(attempts)
    held: dict[int, int] = {}
    for step, attempt in saved:
        if not is_aside(step, attempt):
            held[step] = max(attempt, held.get(step, attempt))
    return dict(sorted(held.items()))


def set_aside(attempts: Iterable[Attempt]) -> Callable[[int, int], bool]:
    """A function of (step, attempt): True if a later attempt went back before that step."""
    numbers: list[int] = []
    lowest_from: list[int] = []
    for attempt in sorted(attempts, key=lambda one: one.number, reverse=True):
        numbers.append(attempt.number)
        lowest_from.append(min([attempt.base_step, *lowest_from[-1:]]))
    numbers.reverse()
    lowest_from.reverse()

    def is_aside(step: int, attempt: int) -> bool:
        later = bisect_right(numbers, attempt)
        return later < len(numbers) and lowest_from[later] < step

    return is_aside


def list_attempts(objects: ObjectStore) -> list[Attempt]:
    """Every attempt of the run, by number.

    Raises:
        UnsupportedFormatError, CorruptionError: an attempt's object can't be read; nothing could be
            judged then.
    """
    names = {
        name: number
        for name in objects.children(ATTEMPTS)
        if (number := parse_attempt_file(name)) is not None
    }
    records = objects.parse_many(names, _AttemptRecord.parse)
    return sorted(
        (
            Attempt(names[name], record.base_step, record.writer, record.at)
            for name, record in records.items()
        ),
        key=lambda attempt: attempt.number,
    )


def create_attempt(objects: ObjectStore, attempt: Attempt) -> Attempt | None:
    """`attempt`, now that it exists; None if its number was taken.

    Only for who holds the lease, see `cairn.storage.runs.lease.begin_attempt`.
    """
    record = _AttemptRecord(base_step=attempt.base_step, writer=attempt.writer, at=attempt.at)
    try:
        objects.write_if(attempt_file(attempt.number), record.to_bytes(), generation=None)
    except PreconditionFailedError:
        return None
    return attempt


def ensure_newest(objects: ObjectStore, attempt: Attempt) -> None:
    """Do nothing if `attempt` is the run's newest. Call before publishing a step.

    Raises:
        FencedError: a later attempt exists, or this one does not any more: the run was removed.
    """
    newest = newest_number(objects)
    if newest > attempt.number:
        raise FencedError(
            "this writer was replaced",
            path=objects.uri,
            expected=f"attempt {attempt.number} of {attempt.writer} to be the newest",
            found=f"attempt {newest}",
            next_step="Stop this process, or begin a new attempt from the latest step.",
        )
    if newest < attempt.number and objects.read(attempt_file(attempt.number)) is None:
        raise FencedError(
            "the run was removed",
            path=objects.uri / attempt_file(attempt.number),
            expected=f"the record of attempt {attempt.number}, which {attempt.writer} writes",
            found="none",
            next_step="Stop this process, or begin the run anew; nothing that this attempt saved "
            "is listed.",
        )


def free_number(objects: ObjectStore) -> int:
    """The number of the next attempt, if nobody else takes it."""
    # Of folders too: one that was put there by hand must not be written into.
    folders = (f"{folder}.json" for folder in objects.folders(ATTEMPTS))
    return max(_highest(folders), newest_number(objects)) + 1


def newest_number(objects: ObjectStore) -> int:
    """The number of the newest attempt; 0 if there is none."""
    return _highest(objects.children(ATTEMPTS))


def _highest(names: Iterable[str]) -> int:
    numbers = (parse_attempt_file(name) for name in names)
    return max((number for number in numbers if number is not None), default=0)
