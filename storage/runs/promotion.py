"""Promotion: an alias moves to a step, which is marked as in use so that it is not deleted."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, SupportsIndex

from cairn.counts import count_text
from cairn.storage.errors import CorruptionError
from cairn.storage.runs.damage import damage_of, refuse_damaged
from cairn.storage.runs.history import StepKey, certain_holder, overwriting, saved_among
from cairn.storage.runs.lease import Lease
from cairn.storage.runs.records.aliases import Alias, AliasEvent, AliasWriter
from cairn.storage.runs.records.annotations import Damage
from cairn.storage.runs.records.attempts import judge_attempts
from cairn.storage.runs.records.layout import (
    ATTEMPTS,
    LEASE_FILE,
    alias_file,
    check_step,
    manifest_file,
    manifest_files,
    parse_attempt_file,
    parse_manifest_file,
    parse_trash_file,
    trash_file,
    trash_files,
)
from cairn.storage.runs.records.placed import UNREADABLE, parse_record, read_run_info
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_files import file_places, listed_problems, removed_by_owner
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.runs.trash import held
from cairn.storage.store.objects import Versioned
from cairn.storage.store.open_files import open_files

__all__ = ["delete_alias", "promote_step"]


def promote_step(
    run: Run,
    step: SupportsIndex,
    alias: str,
    *,
    by: str = "",
    reason: str = "",
    expect: int | None,
    lost: AliasEvent | None = None,
    opened: bool = True,
    check: Callable[[StepInfo], None] | None = None,
    later: Callable[[Callable[[], None]], object] | None = None,
) -> Alias:
    """Point `alias` at a listed step, if the alias is unchanged since the caller read it.

    This takes four round trips to the store: list the relevant names; mark the step as in use and
    read its records; read them again now that it is marked; move the alias. Damage that is noted
    before the third round trip is noticed.

    Args:
        run: the run.
        step: one of its listed steps.
        alias: the alias.
        by: the caller's name.
        reason: reason of the promotion, for the alias's history.
        expect: the alias's sequence that the caller last read; None: the alias must not exist. A
            deleted alias does not exist.
        lost: the alias's last event according to another record; if the store has lost it, it is
            restored to the history before the move.
        opened: False if the caller has not checked that the run exists; it is then checked here.
        check: called with the step right before the alias moves, while the step is in use. If it
            raises, the alias stays.
        later: receives the function that removes the mark, to call it soon in the background; None:
            the mark is removed before this returns.

    Raises:
        RunNotFoundError: there is no such run, and `opened` is False.
        StepNotFoundError: the step is not listed; or it was imported, and its owner has removed it.
        StepInFlightError: the step is being written.
        StepDamagedError: the step's last verification failed; it can't be promoted for any reason.
        CorruptionError: the step was imported, and a listing shows that its owner has changed it;
            or its annotation, which would show damage, can't be read.
        PreconditionFailedError: the alias changed; `current` is the `Alias` or None.
        StepChangedError: the step was deleted meanwhile, or is about to be; the alias stays.
        InvalidURIError: `alias` is not a valid alias name, or `step` is not a step number.
    """
    look = _Look.at(run, check_step(step), alias, opened)
    with ExitStack() as hold:
        info = _held_and_judged(run, look, hold, by=by, alias=alias)
        _refuse_changed(run, info)
        if check is not None:
            check(info)
        moved = AliasWriter(run.objects, run.clock).move(
            alias,
            step=info.step,
            attempt=info.attempt,
            manifest_digest=info.manifest_digest,
            by=by,
            reason=reason,
            expect=expect,
            # If the alias has moved since it was read, the compare-and-swap fails.
            seen=look.alias,
            lost=lost,
        )
        if later is not None:
            later(hold.pop_all().close)
        return moved


class _Look(NamedTuple):
    """Result of one round trip about a run, a step of it and an alias; nothing is certain yet.

    Attributes:
        step: number of the step.
        lease: the stored record of the lease.
        alias: the stored record of the alias.
        attempts: names of the records of attempts.
        published: (step, attempt) of the step's manifests.
        deleted: (step, attempt) of the step's tombstones.
    """

    step: int
    lease: Versioned | None
    alias: Versioned | None
    attempts: list[str]
    published: set[StepKey]
    deleted: set[StepKey]

    @classmethod
    def at(cls, run: Run, step: int, alias: str, opened: bool) -> "_Look":
        objects = run.objects
        there, lease, stored, attempts, manifests, trash = objects.gather(
            lambda: opened or read_run_info(objects) is not None,
            partial(objects.read, LEASE_FILE),
            partial(objects.read, alias_file(alias)),
            partial(_attempts, run),
            partial(objects.list, manifest_files(step)),
            partial(objects.list, trash_files(step)),
        )
        if not there:
            run.info()  # raises an error that says what exists instead
        published = {key for name in manifests if (key := parse_manifest_file(name)) is not None}
        deleted = {key for name in trash if (key := parse_trash_file(name)) is not None}
        return cls(step, lease, stored, attempts, published, deleted)

    @property
    def candidate(self) -> StepKey | None:
        """Newest copy of the step, the only one that may be listed; None if deleted or absent."""
        newest = max(self.published, default=None)
        return None if newest is None or newest in self.deleted else newest


def _attempts(run: Run) -> list[str]:
    names = run.objects.children(ATTEMPTS)
    return [name for name in names if parse_attempt_file(name) is not None]


def _held_and_judged(run: Run, look: _Look, hold: ExitStack, *, by: str, alias: str) -> StepInfo:
    """Return the listed step, which is marked as in use until `hold` ends."""

    def hold_it(key: StepKey) -> Damage | None:
        reason, noted = f"promote it to {alias!r}", partial(damage_of, run, key)
        damage: Damage | None = hold.enter_context(
            held(run, key, by=by, reason=reason, beside=noted)
        )
        return damage

    info = damage = None
    # Mark and judge the likely step in one round; if it is uncertain, read the whole history.
    if look.candidate is not None:
        info, damage = run.objects.gather(
            partial(_listed, run, look, look.candidate), partial(hold_it, look.candidate)
        )
    if not isinstance(info, StepInfo):
        hold.close()
        info = run.step(look.step)  # judged by the whole history
        damage = hold_it((info.step, info.attempt))
    refuse_damaged(run, info, always=True, damage=damage)
    return info


def _listed(run: Run, look: _Look, key: StepKey) -> StepInfo | None:
    """Return the step if it is certainly listed; None if that is uncertain.

    Records are read by name, because a store's listing may be stale. Attempts are listed again
    after the manifests, so that a manifest's own attempt is among them.
    """
    objects = run.objects
    if look.lease is None:
        return None
    try:
        lease = parse_record(objects, LEASE_FILE, Lease, look.lease)
    except UNREADABLE:
        return None
    numbers = {number for name in look.attempts if (number := parse_attempt_file(name)) is not None}
    later = [(look.step, number) for number in sorted(numbers) if number >= key[1]]
    described, manifests, tombstones, attempts, names = objects.gather(
        lambda: run.described([(key, StepState.LISTED)]),
        lambda: objects.existing(manifest_file(*other) for other in later if other != key),
        lambda: objects.existing(trash_file(*other) for other in later),
        lambda: judge_attempts(objects, lease.begun, listed=look.attempts),
        lambda: _attempts(run),
    )
    known_numbers = {attempt.number for attempt in attempts.known}
    # A record appeared between the two reads, or a later copy exists: the step is uncertain.
    if names != look.attempts or known_numbers != numbers or manifests:
        return None
    deleted = [other for other in later if trash_file(*other) in tombstones]
    # Most steps have no such keys, and then this makes no request.
    published = look.published.union(saved_among(objects, overwriting(key, attempts.known)))
    holder = certain_holder(look.step, lease, attempts, published, deleted)
    infos = [info for info in described if info.problem is None and info.attempt == holder]
    return infos[0] if infos else None


def delete_alias(
    run: Run,
    alias: str,
    *,
    by: str = "",
    reason: str = "",
    expect: int,
    lost: AliasEvent | None = None,
) -> Alias:
    """Delete an alias that is unchanged since the caller read it; return its tombstone.

    The tombstone keeps the alias's history.

    Args:
        run: the run.
        alias: the alias.
        by: the caller's name.
        reason: reason of the deletion, for the alias's history.
        expect: the alias's sequence that the caller last read.
        lost: as in `promote_step`; an alias that the store has lost is restored and deleted.

    Raises:
        AliasNotFoundError: there is no such alias.
        PreconditionFailedError: the alias changed; `current` is the `Alias`.
    """
    writer = AliasWriter(run.objects, run.clock)
    return writer.delete(alias, by=by, reason=reason, expect=expect, lost=lost)


def _refuse_changed(run: Run, info: StepInfo) -> None:
    """Raise an error if a listing shows that an imported step's files are gone or have changed."""
    if info.source is None:
        return
    place, *_ = file_places(run.step_uri(info), run.manifest(info).inline_objects, info.source)
    listed = {entry.name: entry for entry in open_files(place.folder).walk()}
    if not listed:
        raise removed_by_owner(place.folder)
    problems = listed_problems(listed, place.records)
    if problems:
        raise CorruptionError(
            "files of the step are not what was adopted",
            path=place.folder,
            expected=f"the {count_text(len(place.records), 'file')} that its manifest names",
            found=count_text(len(problems), "that is not", "that are not"),
            next_step="Use another step, or adopt the folder into a new run.",
            problems=[problems[name] for name in sorted(problems)],
        )
