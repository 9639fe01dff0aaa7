"""Events about changes of the catalog's rows: moved aliases, new states of steps, damage. Pure."""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any, Final, NamedTuple

from cairn.service.catalog.events.outbox import NewEvent
from cairn.service.schemas import CheckpointState, EventKind
from cairn.storage.runs.records.aliases import Alias
from cairn.storage.store.clock import from_rfc3339, rfc3339

_NAMED: Final = 5
"""Largest number of damaged leaves, and of problems, that an event names."""


class Subject(NamedTuple):
    """Run that events are about. A new run with the name of a deleted one is a different subject.

    Attributes:
        root: Name of its root.
        run: Name of the run.
        created: Time when the run was made.
    """

    root: str
    run: str
    created: datetime

    def event(
        self,
        kind: EventKind,
        key: tuple[str | int | None, ...],
        detail: dict[str, Any],
        when: datetime | None = None,
    ) -> NewEvent:
        """Return an event of this run; its key also includes `created`."""
        return NewEvent(kind, self.root, self.run, (rfc3339(self.created), *key), detail, when)


class Seen(NamedTuple):
    """Sequence number and step of an alias, as the last refresh read them."""

    sequence: int
    step: int


class Step(NamedTuple):
    """Step whose state has changed."""

    step: int
    attempt: int
    state: str
    manifest_digest: str | None
    nbytes: int | None
    created: datetime | None


class Verification(NamedTuple):
    """Step that has become damaged, or is no longer damaged.

    Attributes:
        step, attempt: Key of the step.
        before: Damage in its row before; None: none.
        damaged: Damage now; None: none.
        verified: Time when the step was found intact.
    """

    step: int
    attempt: int
    before: dict[str, Any] | None
    damaged: dict[str, Any] | None
    verified: datetime | None


def alias_moved(
    run: Subject, alias: Alias, before: Seen | None, *, look: int = 0
) -> Iterator[NewEvent]:
    """Yield the moves of an alias since it was last seen, as far as its record's history goes back.

    Args:
        run: Run of the alias.
        alias: Stored record now, perhaps a tombstone.
        before: The alias at the last refresh; None: it did not exist, and only moves since its last
            deletion are yielded.
        look: Number that is unique to this refresh. It makes the event of a record that was put
            back unique, so that the event is published each time.
    """
    moves = alias.history or (alias,)
    again: tuple[int, ...] = ()
    if before is None:
        since = max((move.sequence for move in moves[:-1] if move.deleted), default=0)
    elif alias.sequence > before.sequence:
        since = before.sequence
    else:  # the record was overwritten, or restored from a backup
        since, again = alias.sequence - 1, (look,)
    last = before
    for move in moves:
        if move.sequence <= since:
            continue
        if move.deleted:
            when = from_rfc3339(move.at)
            yield _deleted(run, alias.alias, move.sequence, last, by=move.by, when=when)
            last = None
            continue
        yield run.event(
            EventKind.ALIAS_MOVED,
            (alias.alias, move.sequence, move.step, move.attempt, move.at, *again),
            {
                "alias": alias.alias,
                "sequence": move.sequence,
                "step": move.step,
                "attempt": move.attempt,
                "manifest_digest": move.manifest_digest,
                "by": move.by,
                "reason": move.reason,
                "moved": move.at,
                "before": None if last is None else last._asdict(),
            },
            from_rfc3339(move.at),
        )
        last = Seen(move.sequence, move.step)


def alias_gone(run: Subject, alias: str, before: Seen) -> NewEvent:
    """Return the event of a deleted alias; who deleted it is only in the alias's history."""
    return _deleted(run, alias, before.sequence + 1, before, by=None, when=None)


def step_states(run: Subject, steps: Iterable[Step]) -> Iterator[NewEvent]:
    """Yield the events of steps with a new state, by step: durable or abandoned."""
    for changed in sorted(steps, key=lambda step: (step.step, step.attempt)):
        if changed.state == CheckpointState.LISTED:
            yield run.event(
                EventKind.STEP_DURABLE,
                (changed.step, changed.attempt, changed.manifest_digest),
                {
                    "step": changed.step,
                    "attempt": changed.attempt,
                    "manifest_digest": changed.manifest_digest,
                    "bytes": changed.nbytes,
                    "saved": None if changed.created is None else rfc3339(changed.created),
                },
                changed.created,
            )
        elif changed.state == CheckpointState.ABANDONED:
            yield run.event(
                EventKind.RUN_STALLED,
                (changed.step, changed.attempt),
                {"step": changed.step, "attempt": changed.attempt},
            )


def verifications(run: Subject, steps: Iterable[Verification]) -> Iterator[NewEvent]:
    """Yield the events of steps that have become damaged or intact again, by step."""
    for verification in sorted(steps, key=lambda step: (step.step, step.attempt)):
        place = {"step": verification.step, "attempt": verification.attempt}
        key = verification.step, verification.attempt
        if verification.damaged is not None:
            when = datetime.fromisoformat(verification.damaged["at"])
            at = rfc3339(when)
            counts = {
                name: verification.damaged[name] for name in ("job", "leaf_count", "problem_count")
            }
            named = {name: verification.damaged[name][:_NAMED] for name in ("leaves", "problems")}
            detail = {**place, "verified": at, **counts, **named}
            yield run.event(EventKind.STEP_DAMAGED, (*key, at), detail, when)
        elif verification.before is not None and verification.verified is not None:
            # Without `verified` the record of the damage was lost, which does not prove recovery.
            at = rfc3339(verification.verified)
            detail = {**place, "verified": at, "damaged": verification.before["at"]}
            yield run.event(EventKind.STEP_RECOVERED, (*key, at), detail, verification.verified)


def _deleted(
    run: Subject,
    alias: str,
    sequence: int,
    before: Seen | None,
    *,
    by: str | None,
    when: datetime | None,
) -> NewEvent:
    return run.event(
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
