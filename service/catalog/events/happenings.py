"""What a change of the catalog's rows tells: which events, in which order. Pure."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final, NamedTuple

from cairn.service.catalog.events.outbox import Happening
from cairn.service.schemas import CheckpointState, EventKind
from cairn.storage.runs import Alias
from cairn.storage.store import from_rfc3339, rfc3339

_NAMED: Final = 5
"""Damaged leaves, and problems, that an event names."""


class Subject(NamedTuple):
    """The run that events are about; one that was made anew under a name is another.

    Attributes:
        root: Name of its root.
        run: Its name.
        created: When it was made.
    """

    root: str
    run: str
    created: datetime

    def happening(
        self,
        kind: EventKind,
        key: tuple[str | int | None, ...],
        detail: dict[str, Any],
        when: datetime | None = None,
    ) -> Happening:
        """Something that happened to it."""
        return Happening(kind, self.root, self.run, (rfc3339(self.created), *key), detail, when)


class Seen(NamedTuple):
    """Where an alias was when the catalog last looked."""

    sequence: int
    step: int


class Step(NamedTuple):
    """A step whose state has become another one."""

    step: int
    attempt: int
    state: str
    manifest_digest: str | None
    nbytes: int | None
    created: datetime | None


class Verification(NamedTuple):
    """A step that has become damaged, or is so no more.

    Attributes:
        step, attempt: The step.
        before: What was wrong with it, as its row had it; None: nothing.
        damaged: What is wrong with it now; None: nothing.
        verified: When it was found sound.
    """

    step: int
    attempt: int
    before: dict[str, Any] | None
    damaged: dict[str, Any] | None
    verified: datetime | None


def alias_moved(
    run: Subject, alias: Alias, before: Seen | None, *, look: int = 0
) -> Iterator[Happening]:
    """What has happened to an alias since it was seen, as far as its record remembers.

    Args:
        run: The alias's.
        alias: As it is stored now, maybe as a tombstone.
        before: Where it was; None: it was not there, and what it was before is not told.
        look: A number that no other look has: what it finds put back is told again.
    """
    moves = alias.history or (alias,)
    again: tuple[int, ...] = ()
    if before is None:
        since = max((one.sequence for one in moves[:-1] if one.deleted), default=0)
    elif alias.sequence > before.sequence:
        since = before.sequence
    else:  # written over, or put back
        since, again = alias.sequence - 1, (look,)
    last = before
    for one in moves:
        if one.sequence <= since:
            continue
        if one.deleted:
            when = from_rfc3339(one.at)
            yield _deleted(run, alias.alias, one.sequence, last, by=one.by, when=when)
            last = None
            continue
        yield run.happening(
            EventKind.ALIAS_MOVED,
            (alias.alias, one.sequence, one.step, one.attempt, one.at, *again),
            {
                "alias": alias.alias,
                "sequence": one.sequence,
                "step": one.step,
                "attempt": one.attempt,
                "manifest_digest": one.manifest_digest,
                "by": one.by,
                "reason": one.reason,
                "moved": one.at,
                "before": None if last is None else last._asdict(),
            },
            from_rfc3339(one.at),
        )
        last = Seen(one.sequence, one.step)


def alias_gone(run: Subject, alias: str, before: Seen) -> Happening:
    """An alias is not there any more; who deleted it, its history says."""
    return _deleted(run, alias, before.sequence + 1, before, by=None, when=None)


def step_states(run: Subject, steps: Iterable[Step]) -> Iterator[Happening]:
    """Of steps that are in another state than before, by step, what somebody waits for."""
    for one in sorted(steps, key=lambda step: (step.step, step.attempt)):
        if one.state == CheckpointState.LISTED:
            yield run.happening(
                EventKind.STEP_DURABLE,
                (one.step, one.attempt, one.manifest_digest),
                {
                    "step": one.step,
                    "attempt": one.attempt,
                    "manifest_digest": one.manifest_digest,
                    "bytes": one.nbytes,
                    "saved": None if one.created is None else rfc3339(one.created),
                },
                one.created,
            )
        elif one.state == CheckpointState.ABANDONED:
            yield run.happening(
                EventKind.RUN_STALLED,
                (one.step, one.attempt),
                {"step": one.step, "attempt": one.attempt},
            )


def verifications(run: Subject, steps: Iterable[Verification]) -> Iterator[Happening]:
    """Of steps that have become damaged or sound, by step, what their verifications found."""
    for one in sorted(steps, key=lambda step: (step.step, step.attempt)):
        place = {"step": one.step, "attempt": one.attempt}
        key = one.step, one.attempt
        if one.damaged is not None:
            when = datetime.fromisoformat(one.damaged["at"])
            at = rfc3339(when)
            counts = {name: one.damaged[name] for name in ("job", "leaf_count", "problem_count")}
            named = {name: one.damaged[name][:_NAMED] for name in ("leaves", "problems")}
            detail = {**place, "verified": at, **counts, **named}
            yield run.happening(EventKind.STEP_DAMAGED, (*key, at), detail, when)
        elif one.before is not None and one.verified is not None:
            # Without the latter what was noted is lost: that lifts nothing.
            at = rfc3339(one.verified)
            detail = {**place, "verified": at, "damaged": one.before["at"]}
            yield run.happening(EventKind.STEP_RECOVERED, (*key, at), detail, one.verified)


def _deleted(
    run: Subject,
    alias: str,
    sequence: int,
    before: Seen | None,
    *,
    by: str | None,
    when: datetime | None,
) -> Happening:
    return run.happening(
        EventKind.ALIAS_DELETED,
        (alias, sequence),
        {
            "alias": alias,
            "sequence": sequence,
            "by": by,
            "before": None if before is None else before._asdict(),
        },
        when,
    )
