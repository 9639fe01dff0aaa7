"""Promotion: an alias moves to a step, which is held meanwhile so that no deletion of it begins."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, SupportsIndex

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
    """Point `alias` at a listed step, if the alias is still as the caller last saw it.

    The caller waits for four round trips to the store: a look at all names that matter; the hold,
    with a closer look; another look, now that the step is held; the move of the alias. Damage that
    is noted before the third is seen there.

    Args:
        run: the run.
        step: one of its listed steps.
        alias: the alias.
        by: the caller's name.
        reason: why.
        expect: the alias's sequence last seen; None: it must not exist. A deleted alias does not
            exist.
        lost: the alias's last event known elsewhere, if the store may have lost it: the move comes
            after it.
        opened: False if the caller has not checked that the run exists; then it is checked here.
        check: called with the step right before the alias moves, while the step is held. If it
            raises, the alias stays.
        later: receives the function that releases the hold, to call it soon in the background. By
            default the hold is released before this returns.

    Raises:
        RunNotFoundError: there is no such run, and `opened` is False.
        StepNotFoundError: the step is not listed; or it was adopted, and its owner has removed it.
        StepInFlightError: it is being written.
        StepDamagedError: its last verification has failed; there is no way to promote it all the
            same.
        CorruptionError: it was adopted, and a listing shows that its owner has changed it; or the
            annotation that would show damage can't be read.
        PreconditionFailedError: the alias changed; `current` is the `Alias` or None.
        StepChangedError: the step was deleted meanwhile, or is about to be; the alias is unchanged.
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
            # If it has moved since that look, the compare-and-swap fails.
            seen=look.alias,
            lost=lost,
        )
        if later is not None:
            later(hold.pop_all().close)
        return moved


class _Look(NamedTuple):
    """Result of one round trip about a run, a step of it and an alias; nothing is certain yet.

    Attributes:
        step: the step.
        lease: the lease, as stored.
        alias: the alias, as stored.
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
        """Only copy of the step that can be listed: what supersedes it supersedes earlier ones."""
        newest = max(self.published, default=None)
        return None if newest is None or newest in self.deleted else newest


def _attempts(run: Run) -> list[str]:
    names = run.objects.children(ATTEMPTS)
    return [name for name in names if parse_attempt_file(name) is not None]


def _held_and_judged(run: Run, look: _Look, hold: ExitStack, *, by: str, alias: str) -> StepInfo:
    """Return the listed step, held until `hold` ends."""

    def hold_it(key: StepKey) -> Damage | None:
        reason, noted = f"promote it to {alias!r}", partial(damage_of, run, key)
        damage: Damage | None = hold.enter_context(
            held(run, key, by=by, reason=reason, beside=noted)
        )
        return damage

    info = damage = None
    # Hold and judge the likely step in one round; if it is not certain, judge by the whole history.
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
    """Return the step if it is listed for certain, read by name: a store's listing may be stale.

    Attempts are listed again, after the manifests, so that the attempt that wrote a manifest is
    among those that judge it.
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
    # A record appeared between the looks, or a later copy exists: nothing is certain.
    if names != look.attempts or known_numbers != numbers or manifests:
        return None
    deleted = [other for other in later if trash_file(*other) in tombstones]
    # Most steps have no such keys: then this takes no request.
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
    """Delete an alias that is still as last seen; return its tombstone, which keeps the history.

    Args:
        run: the run.
        alias: the alias.
        by: the caller's name.
        reason: why.
        expect: its sequence last seen.
        lost: as in `promote_step`; an alias that the store has lost is deleted as it was then.

    Raises:
        AliasNotFoundError: there is no such alias.
        PreconditionFailedError: it changed; `current` is the `Alias`.
    """
    writer = AliasWriter(run.objects, run.clock)
    return writer.delete(alias, by=by, reason=reason, expect=expect, lost=lost)


def _refuse_changed(run: Run, info: StepInfo) -> None:
    """Raise if an adopted step's files are gone or have changed, as a listing shows."""
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
            expected=f"the {len(place.records)} files that its manifest names",
            found=f"{len(problems)} that are not",
            next_step="Use another step, or adopt the folder into a new run.",
            problems=[problems[name] for name in sorted(problems)],
        )
