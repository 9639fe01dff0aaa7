"""Steps of a run as its records show them at one moment, and the errors of the records.

If a record is lost, damaged or in the place of another, other records show that: the next attempt,
the lease and manifests name an attempt; the lease names the step that was last reported durable;
attempts name a step that had overwritten another. The state of a step is derived only from what the
remaining records prove.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from cairn.storage.errors import CorruptionError, StorageError
from cairn.storage.runs.lease import Lease, Seen
from cairn.storage.runs.records.attempts import (
    Attempt,
    AttemptsFound,
    counting,
    find_superseded,
    highest_number,
    judge_attempts,
    told_steps,
)
from cairn.storage.runs.records.layout import (
    ATTEMPTS,
    COMMIT_FILE,
    LEASE_FILE,
    MANIFESTS,
    MAX_NUMBER,
    TRASH,
    attempt_dir,
    attempt_file,
    forgotten_file,
    manifest_file,
    parse_attempt_file,
    parse_manifest_file,
    parse_step_folder,
    parse_trash_file,
    trash_file,
)
from cairn.storage.runs.records.placed import UNREADABLE, misplaced, parse_record
from cairn.storage.runs.step_states import StepState
from cairn.storage.store.objects import ObjectStore, Versioned

__all__ = [
    "History",
    "RunListing",
    "StepKey",
    "certain_holder",
    "history_since",
    "judge_lease",
    "list_records",
    "overwriting",
    "published_steps",
    "read_history",
    "saved_among",
    "seen_in",
    "trashed_steps",
]

StepKey = tuple[int, int]
"""Key of a step: (step, attempt)."""

_LOOKS: Final = 5
"""Number of tries to read a history while the lease changes and names records not read yet."""


@dataclass(frozen=True)
class History:
    """Steps of a run, and the errors of its records.

    Attributes:
        published: (step, attempt) of every manifest, by step.
        deleted: (step, attempt) of every tombstone.
        lost: steps whose manifest is gone without a tombstone that explains it: the step that was
            last reported durable, and steps that had overwritten one that still exists.
        doubted: deleted steps above all listed ones whose tombstone is the record of another step.
        attempts: every attempt, as far as records show them.
        problems: errors of the records that decide about steps, by the record's name.
    """

    published: tuple[StepKey, ...]
    deleted: frozenset[StepKey]
    lost: frozenset[StepKey]
    attempts: AttemptsFound
    problems: Mapping[str, StorageError]
    doubted: frozenset[StepKey] = frozenset()

    def require_whole(self) -> None:
        """Raise an error if a record is damaged or lost. Call this before deleting.

        Raises:
            UnsupportedFormatError, CorruptionError: a record is damaged or lost; all such are
                named.
        """
        for error in self.problems.values():
            raise type(error)(
                "nothing can be judged for certain",
                path=error.path,
                expected="every record that steps are judged by, as it was written",
                found=f"{len(self.problems)} that are not",
                next_step="See what `cairn repair` can do, or restore them from a backup.",
                problems=[str(problem) for problem in self.problems.values()],
            ) from error

    def states(
        self, keys: Iterable[StepKey] | None = None, *, undeleted: Collection[StepKey] = ()
    ) -> list[tuple[StepKey, StepState]]:
        """Return the states of steps that have a manifest.

        Args:
            keys: the steps; by default all.
            undeleted: deleted steps to treat as not deleted.
        """
        least, most = self._holders()
        trashed = self.deleted.difference(undeleted)

        def state(key: StepKey) -> StepState:
            step, attempt = key
            if key in self.doubted:
                return StepState.UNJUDGED
            if key in trashed:
                return StepState.TRASHED
            counts = {least.get(step) == attempt, most.get(step) == attempt}
            # The step counts under only one of the two assumptions about unknown attempts.
            if len(counts) > 1:
                return StepState.UNJUDGED
            return StepState.LISTED if True in counts else StepState.SUPERSEDED

        return [(key, state(key)) for key in (self.published if keys is None else keys)]

    def listed(self, *, undeleted: Collection[StepKey] = ()) -> dict[int, int]:
        """Return the steps that are certainly listed -> the attempt that holds each of them."""
        judged = self.states(undeleted=undeleted)
        return {step: number for (step, number), state in judged if state is StepState.LISTED}

    def holder(self, step: int) -> int | None:
        """Return the attempt that holds a step, even if its manifest is lost; None if uncertain."""
        least, most = self._holders()
        return least.get(step) if least.get(step) == most.get(step) else None

    def without(self, key: StepKey | None) -> "History":
        """Return the history as if the step `key` had never been published."""
        published = tuple(other for other in self.published if other != key)
        return replace(self, published=published, lost=self.lost - {key})

    def latest(self) -> StepKey | None:
        """Return (step, attempt) of the highest listed step; None if no step is listed.

        Raises:
            UnsupportedFormatError, CorruptionError: a record that decides about it is damaged or
                lost.
        """
        judged = self.states()
        kept = (StepState.LISTED, StepState.UNJUDGED)
        highest = max((key for key, state in judged if state in kept), default=None)
        for step, _ in self.lost:
            # A lost step above the highest one would be the latest: raise instead of going back
            # silently.
            if highest is None or step >= highest[0]:
                self.require_judged(step)
        if highest is not None:
            self.require_judged(highest[0])
        return highest

    def require_judged(self, step: int) -> None:
        """Raise an error if the records don't show which attempt holds `step`.

        Raises:
            UnsupportedFormatError, CorruptionError: a record that decides about it is damaged or
                lost.
        """
        least, most = self._holders()
        for key in self.doubted:
            if key[0] == step:
                raise self.problems[trash_file(*key)]
        for holders in (least, most):
            if (step, holders.get(step)) in self.lost:
                raise self.problems[manifest_file(step, holders[step])]
        if least.get(step) != most.get(step):
            raise next(self.problems[attempt_file(number)] for number in self.attempts.unknown)

    def _holders(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return step -> attempt that holds it, under two assumptions about unknown attempts.

        The first: they superseded nothing. The second: they superseded every earlier step. Where
        both results agree, the holder is certain.
        """
        saved = self.deleted.union(self.published, self.lost)
        attempts, unknown = self.attempts.known, self.attempts.unknown
        if not unknown:
            holders = counting(saved, attempts)
            return holders, holders
        # With the one base the unknown attempts supersede nothing, with the other every earlier
        # step.
        least, most = (
            counting(saved, [*attempts, *(Attempt(number, base, "", "") for number in unknown)])
            for base in (MAX_NUMBER, -1)
        )
        return least, most


def published_steps(objects: ObjectStore) -> list[StepKey]:
    """Return (step, attempt) of every manifest, by step; only names are read."""
    names = (parse_manifest_file(name) for name in objects.list(MANIFESTS))
    return sorted(key for key in names if key is not None)


def trashed_steps(objects: ObjectStore) -> set[StepKey]:
    """Return (step, attempt) of every deleted step; only names are read."""
    names = (parse_trash_file(name) for name in objects.list(TRASH))
    return {key for key in names if key is not None}


def overwriting(key: StepKey, attempts: Iterable[Attempt]) -> set[StepKey]:
    """Return (step, attempt) of lower steps whose publication would also supersede `key`."""
    step, attempt = key
    return {
        (later.overwrites, later.number)
        for later in attempts
        if later.overwrites is not None and later.number > attempt and later.overwrites < step
    }


def saved_among(objects: ObjectStore, keys: Collection[StepKey]) -> list[StepKey]:
    """Return the steps of `keys` that have a manifest or a tombstone."""
    names = [name for key in keys for name in (manifest_file(*key), trash_file(*key))]
    present = objects.existing(names)
    return [key for key in keys if present.intersection((manifest_file(*key), trash_file(*key)))]


def certain_holder(
    step: int,
    lease: Lease | None,
    attempts: AttemptsFound,
    published: Collection[StepKey],
    deleted: Collection[StepKey],
) -> int | None:
    """Return the attempt that holds a step, if the step is certainly listed.

    None: it is uncertain, and the whole history must be read.

    Args:
        step: the step.
        lease: the lease, read before the attempts.
        attempts: attempts of the run.
        published: (step, attempt) of every manifest of this step, and of the steps of `overwriting`
            that have a manifest or a tombstone.
        deleted: (step, attempt) of this step's tombstones, at least those of the newest attempt
            that published it and of later ones.
    """
    if lease is None or attempts.problems or not published:
        return None
    noted = lease.durable
    if noted is not None and noted[0] == step and noted not in published:
        return None  # its manifest is lost
    attempt = counting(published, attempts.known).get(step)
    if attempt is None:
        return None
    later = {(step, other.number) for other in attempts.known if other.number >= attempt}
    gone = later.intersection(deleted)
    saved = told_steps(attempts.known, published if noted is None else [*published, noted])
    needed = later | overwriting((step, attempt), attempts.known)
    if saved.intersection(needed).difference(published, gone):
        return None  # a step that had overwritten this one is lost
    # Deleting a step does not bring back what it had overwritten.
    holder = counting([*published, *gone], attempts.known).get(step)
    return attempt if holder == attempt and (step, attempt) not in gone else None


def judge_lease(objects: ObjectStore) -> tuple[Lease | None, dict[str, StorageError]]:
    """Return the lease or None, and its error by name, if there is one."""
    return _parsed_lease(objects, objects.read(LEASE_FILE))


def _parsed_lease(
    objects: ObjectStore, stored: Versioned | None
) -> tuple[Lease | None, dict[str, StorageError]]:
    try:
        lease = None if stored is None else parse_record(objects, LEASE_FILE, Lease, stored)
    except UNREADABLE as exc:
        return None, {LEASE_FILE: exc}
    return lease, {}


class RunListing(NamedTuple):
    """Result of one round of concurrent requests about a run.

    Attributes:
        lease: the stored record of the lease; None if there is none.
        published: (step, attempt) of every manifest, by step.
        attempts: names of the records of attempts; None if they were not listed.
        folders: names of the folders of attempts.
    """

    lease: Versioned | None
    published: list[StepKey]
    attempts: list[str] | None
    folders: list[str]

    @property
    def is_empty(self) -> bool:
        """True if no writer has begun here: a writer takes the lease first."""
        return not (self.lease or self.published or self.folders) and self.attempts == []


def seen_in(
    objects: ObjectStore, listing: RunListing, history: History, latest: StepKey | None
) -> Seen | None:
    """Return the run's state for a start that takes the lease while it is unchanged.

    None if the lease is lost.

    Args:
        objects: the run's objects.
        listing: the listing of the run.
        history: the history that `history_since` returned for the listing.
        latest: the highest listed step; None if there is none.
    """
    lease, _ = _parsed_lease(objects, listing.lease)
    if lease is None and (history.published or history.attempts.known or listing.folders):
        return None  # the lease is lost: a writer that had it may still publish
    newest = [(attempt.number, attempt.base_step) for attempt in history.attempts.known[-1:]]
    return Seen(
        lease,
        None if listing.lease is None else listing.lease.generation,
        newest[0] if newest else (0, -1),
        highest_number(listing.attempts or [], listing.folders),
        -1 if latest is None else latest,
    )


def list_records(objects: ObjectStore) -> RunListing:
    """Return the lease, and the names of manifests and attempts, read in one round; not parsed."""
    lease, published, entries = objects.gather(
        lambda: objects.read(LEASE_FILE),
        lambda: published_steps(objects),
        lambda: objects.entries(ATTEMPTS),
    )
    return RunListing(lease, published, *entries)


def read_history(objects: ObjectStore, listing: RunListing | None = None) -> History:
    """Return the history of a run, from names, the records of attempts and the lease.

    Args:
        objects: the run's objects.
        listing: a listing made just now; with it, one round of requests may do instead of three.
    """
    if listing is None:
        lease, published = objects.gather(
            lambda: objects.read(LEASE_FILE), lambda: published_steps(objects)
        )
        listing = RunListing(lease, published, None, [])
    history = history_since(objects, listing)
    return _in_order(objects) if history is None else history


def history_since(objects: ObjectStore, listing: RunListing) -> History | None:
    """Return the history of a run that was just listed; None if it must be read in order.

    A round sends all requests at once, so their order is undefined. Its result is used only if it
    equals what `read_history` would have read in order: manifests after the lease, because they
    include the step that it names; attempts after manifests, because they are listed again and must
    not have changed; tombstones after manifests, because a manifest goes before its tombstone does.
    """
    lease, problems = _parsed_lease(objects, listing.lease)
    noted = None if lease is None else lease.durable
    begun = None if lease is None else lease.begun
    # The lease names a step that the listing lacks: the step is lost, or the listing stale.
    if problems or (noted is not None and noted not in listing.published):
        return None
    deleted, attempts, again = objects.gather(
        lambda: trashed_steps(objects),
        lambda: judge_attempts(objects, begun, listing.published, listing.attempts),
        lambda: None if listing.attempts is None else objects.children(ATTEMPTS),
    )
    saved = told_steps(
        attempts.known, listing.published if noted is None else [*listing.published, noted]
    )
    if (
        again != listing.attempts
        or attempts.problems
        or not {number for _, number in deleted} <= {attempt.number for attempt in attempts.known}
        or _missed(listing.published, deleted, attempts.known, saved, noted)
    ):
        return None
    history = History(tuple(listing.published), frozenset(deleted), frozenset(), attempts, {})
    return _with_doubts(objects, history)


def _in_order(objects: ObjectStore) -> History:
    """Return the history, read in order, one request after the other.

    The result is right despite damaged records and concurrent changes.

    The lease is read first, because everything it names existed before. Manifests come before
    tombstones, because a removal deletes the manifest first. Both come before attempts, so that the
    attempt that wrote a manifest is among those that judge it.
    """
    history = None
    for _ in range(_LOOKS):
        lease, problems = judge_lease(objects)
        published = published_steps(objects)
        noted = None if lease is None else lease.durable
        begun = None if lease is None else lease.begun
        deleted = trashed_steps(objects)
        attempts = judge_attempts(objects, begun, deleted.union(published))
        lost = set()
        # In the place of the durable step's tombstone is another record, which proves no
        # deletion.
        if noted in deleted.difference(published) and misplaced(objects, trash_file(*noted)):
            deleted.discard(noted)
        saved = told_steps(attempts.known, published if noted is None else [*published, noted])
        saved.update(_left_by(attempts, published, objects))
        attempts = _with_what_steps_tell(attempts, saved | deleted.union(published), objects)
        for key in sorted(_missed(published, deleted, attempts.known, saved, noted)):
            # Read them by name before calling them lost: a store's listing may be stale.
            manifest, trash, forgotten = manifest_file(*key), trash_file(*key), forgotten_file(*key)
            records = objects.read_many([manifest, trash, forgotten])
            if records[manifest] is not None:
                published = sorted([*published, key])
            elif records[trash] is not None and misplaced(objects, trash) is None:
                deleted.add(key)
            elif key == noted or records[forgotten] is None:
                lost.add(key)
                problems[manifest] = _lost(objects, key)
        problems.update(attempts.problems)
        history = History(tuple(published), frozenset(deleted), frozenset(lost), attempts, problems)
        history = _with_doubts(objects, history)
        if not history.problems or judge_lease(objects)[0] == lease:
            break  # else the step that the old lease named was removed: read again
    assert history is not None
    return history


def _with_doubts(objects: ObjectStore, history: History) -> History:
    """Return the history with errors of tombstones that hide a step above the latest listed one.

    It reads each of these tombstones.
    """
    names = {key: trash_file(*key) for key in _hidden(history)}
    wrong = {key: error for key, name in names.items() if (error := misplaced(objects, name))}
    problems = {names[key]: error for key, error in wrong.items()}
    return replace(history, problems={**history.problems, **problems}, doubted=frozenset(wrong))


def _hidden(history: History) -> Iterator[StepKey]:
    """Yield deleted steps above all listed ones that would be listed if they were not deleted."""
    if not history.deleted:
        return
    published = set(history.published)
    steps = counting(history.deleted | published, history.attempts.known)
    # From the highest step down, until one that is not deleted.
    for key in reversed(steps.items()):
        if key not in history.deleted:
            return
        if key in published:
            yield key


def _left_by(
    attempts: AttemptsFound, published: list[StepKey], objects: ObjectStore
) -> Iterator[StepKey]:
    """Yield steps that attempts with damaged or lost records saved, as their folders show.

    Such a step was published if a later step of the same attempt was: steps only go up within an
    attempt, and no attempt goes on after a save that failed.
    """
    last = {number: step for step, number in published}
    for name in attempts.problems:
        number = parse_attempt_file(name)
        if number is None or number not in last:
            continue
        for folder in objects.folders(attempt_dir(number)):
            step_folder = parse_step_folder(folder.rpartition("/")[2])
            if step_folder is None or step_folder.temporary or step_folder.step >= last[number]:
                continue
            if objects.read(f"{folder}/{COMMIT_FILE}") is not None:
                yield step_folder.step, number


def _with_what_steps_tell(
    attempts: AttemptsFound, saved: Collection[StepKey], objects: ObjectStore
) -> AttemptsFound:
    """Return attempts with `overwrites` and `base_attempt` inferred where records are damaged.

    An attempt saves no step up to its base step, except one that it was begun to overwrite, which
    it saves first. It keeps the last copy of its base step. If the manifest or tombstone of the
    first saved step is a record of another place, that step may or may not have been saved; the
    attempt then counts as unknown.
    """

    def filled(attempt: Attempt) -> Attempt | None:
        if attempt_file(attempt.number) not in attempts.problems:
            return attempt
        own = sorted(step for step, number in saved if number == attempt.number)
        first = next((step for step in own if step <= attempt.base_step), None)
        if first is not None:
            key = first, attempt.number
            records = manifest_file(*key), trash_file(*key)
            if any(misplaced(objects, name) is not None for name in records):
                return None
        kept = [
            number
            for step, number in saved
            if step == attempt.base_step and number < attempt.number
        ]
        return replace(attempt, overwrites=first, base_attempt=max(kept, default=None))

    completed = {attempt.number: filled(attempt) for attempt in attempts.known}
    ambiguous = [number for number, attempt in completed.items() if attempt is None]
    return attempts._replace(
        known=[attempt for attempt in completed.values() if attempt is not None],
        unknown=sorted([*attempts.unknown, *ambiguous]),
    )


def _missed(
    published: list[StepKey],
    deleted: set[StepKey],
    attempts: list[Attempt],
    saved: set[StepKey],
    noted: StepKey | None,
) -> set[StepKey]:
    """Return lost steps: published steps without manifest and tombstone whose loss matters.

    Those are the step that the lease names, and steps that had overwritten another: they keep a
    tombstone while the other exists, see `end_removal`. Other deleted steps leave no trace.
    """
    shown = deleted.union(published)
    saved = saved - shown
    missed = set()
    if saved:
        counts = counting(published, attempts)
        is_superseded = find_superseded(attempts, published)
        overwrites = {attempt.number: attempt.overwrites for attempt in attempts}

        def has_overwritten(step: int, number: int) -> bool:
            """Return True if this step hides another one that would count without it."""
            if counts.get(step, number) < number:
                return True
            later = (holder for other, holder in counts.items() if other > step)
            return overwrites.get(number) == step and any(holder < number for holder in later)

        missed = {key for key in saved if not is_superseded(*key) and has_overwritten(*key)}
    if noted is not None and noted not in shown:
        missed.add(noted)
    return missed


def _lost(objects: ObjectStore, key: StepKey) -> CorruptionError:
    return CorruptionError(
        "the manifest of a durable step is lost",
        path=objects.uri / manifest_file(*key),
        expected=f"the manifest of step {key[0]}, which was reported durable, or a tombstone",
        found="neither",
        next_step="Restore it from a backup, see what `cairn repair` can do, or roll back to an "
        "earlier step to go on without it.",
    )
