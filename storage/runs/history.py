"""What the records of a run say of its steps, at one moment: which count, and what is amiss.

One record that is lost, damaged or in another's place is missed by the others: an attempt by the
one after it, by the lease and by its manifests, the step that was reported durable last by the
lease, one that had overwritten another by attempts. What the rest still says for certain is judged;
what it does not is never guessed.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from cairn.storage.errors import CorruptionError, StorageError
from cairn.storage.runs.records import (
    ATTEMPTS,
    COMMIT_FILE,
    LEASE_FILE,
    MANIFESTS,
    MAX_NUMBER,
    TRASH,
    UNREADABLE,
    Attempt,
    AttemptsFound,
    Lease,
    Seen,
    attempt_dir,
    attempt_file,
    counting,
    forgotten_file,
    highest_number,
    judge_attempts,
    manifest_file,
    misplaced,
    parse_attempt_file,
    parse_manifest_file,
    parse_record,
    parse_step_folder,
    parse_trash_file,
    set_aside,
    told_steps,
    trash_file,
)
from cairn.storage.runs.step_states import StepState
from cairn.storage.store import ObjectStore, Versioned

__all__ = [
    "History",
    "Look",
    "StepKey",
    "certain_holder",
    "history_since",
    "judge_lease",
    "look_at",
    "overwriting",
    "published_steps",
    "read_history",
    "saved_among",
    "seen_in",
    "trashed_steps",
]

StepKey = tuple[int, int]
"""(step, attempt)."""

_LOOKS: Final = 5
"""How often the lease may change under a look that misses what it names."""


@dataclass(frozen=True)
class History:
    """The steps of a run, and what is wrong with its records.

    Attributes:
        published: (step, attempt) of every manifest, by step.
        deleted: (step, attempt) of every tombstone.
        lost: steps whose manifest is gone though no tombstone says why: the one that was reported
            durable last, and such as had overwritten one that is there.
        doubted: deleted steps above all that are listed, in the place of whose tombstone there is
            that of another.
        attempts: every attempt, as far as they are known.
        problems: what is wrong with records that steps are judged by, by name.
    """

    published: tuple[StepKey, ...]
    deleted: frozenset[StepKey]
    lost: frozenset[StepKey]
    attempts: AttemptsFound
    problems: Mapping[str, StorageError]
    doubted: frozenset[StepKey] = frozenset()

    def require_whole(self) -> None:
        """Raise if any of the records is amiss: for who is about to delete.

        Raises:
            UnsupportedFormatError, CorruptionError: one is; all are named.
        """
        for error in self.problems.values():
            raise type(error)(
                "nothing can be judged for certain",
                path=error.path,
                expected="every record that steps are judged by, as it was written",
                found=f"{len(self.problems)} that are not",
                next_step="See what `cairn repair` can do, or restore them from a backup.",
                problems=[str(one) for one in self.problems.values()],
            ) from error

    def states(
        self, keys: Iterable[StepKey] | None = None, *, undeleted: Collection[StepKey] = ()
    ) -> list[tuple[StepKey, StepState]]:
        """The states of steps that have a manifest.

        Args:
            keys: which; by default all.
            undeleted: deleted steps that are regarded as not deleted.
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
            if len(counts) > 1:
                return StepState.UNJUDGED
            return StepState.LISTED if True in counts else StepState.SET_ASIDE

        return [(key, state(key)) for key in (self.published if keys is None else keys)]

    def listed(self, *, undeleted: Collection[StepKey] = ()) -> dict[int, int]:
        """The attempt that holds each step that is listed for certain, by step."""
        judged = self.states(undeleted=undeleted)
        return {step: number for (step, number), state in judged if state is StepState.LISTED}

    def holder(self, step: int) -> int | None:
        """The attempt that holds a step, be its manifest lost; None if none does for certain."""
        least, most = self._holders()
        return least.get(step) if least.get(step) == most.get(step) else None

    def without(self, key: StepKey | None) -> "History":
        """The history as it would be if the step `key` had never been published."""
        published = tuple(one for one in self.published if one != key)
        return replace(self, published=published, lost=self.lost - {key})

    def latest(self) -> StepKey | None:
        """The highest listed step, None without any.

        Raises:
            UnsupportedFormatError, CorruptionError: it can't be told which that is.
        """
        judged = self.states()
        kept = (StepState.LISTED, StepState.UNJUDGED)
        highest = max((key for key, state in judged if state in kept), default=None)
        for step, _ in self.lost:
            if highest is None or step >= highest[0]:
                self.require_judged(step)
        if highest is not None:
            self.require_judged(highest[0])
        return highest

    def require_judged(self, step: int) -> None:
        """Raise if it can't be told what holds `step`.

        Raises:
            UnsupportedFormatError, CorruptionError: it can't be.
        """
        least, most = self._holders()
        for key in self.doubted:
            if key[0] == step:
                raise self.problems[trash_file(*key)]
        for held in (least, most):
            if (step, held.get(step)) in self.lost:
                raise self.problems[manifest_file(step, held[step])]
        if least.get(step) != most.get(step):
            raise next(self.problems[attempt_file(one)] for one in self.attempts.unknown)

    def _holders(self) -> tuple[dict[int, int], dict[int, int]]:
        """Which attempt holds each step, if unknown attempts set aside nothing, or all they can.

        Where both agree, so does whatever they did set aside.
        """
        saved = self.deleted.union(self.published, self.lost)
        known, unknown = self.attempts.known, self.attempts.unknown
        if not unknown:
            held = counting(saved, known)
            return held, held
        least, most = (
            counting(saved, [*known, *(Attempt(one, base, "", "") for one in unknown)])
            for base in (MAX_NUMBER, -1)
        )
        return least, most


def published_steps(objects: ObjectStore) -> list[StepKey]:
    """(step, attempt) of every manifest, by step; from names alone."""
    names = (parse_manifest_file(name) for name in objects.list(MANIFESTS))
    return sorted(key for key in names if key is not None)


def trashed_steps(objects: ObjectStore) -> set[StepKey]:
    """(step, attempt) of every deleted step; from names alone."""
    names = (parse_trash_file(name) for name in objects.list(TRASH))
    return {key for key in names if key is not None}


def overwriting(key: StepKey, attempts: Iterable[Attempt]) -> set[StepKey]:
    """(step, attempt) of earlier steps that have overwritten `key` too, if they were published."""
    step, attempt = key
    return {
        (one.overwrites, one.number)
        for one in attempts
        if one.overwrites is not None and one.number > attempt and one.overwrites < step
    }


def saved_among(objects: ObjectStore, keys: Collection[StepKey]) -> list[StepKey]:
    """Those of the steps that have a manifest or a tombstone."""
    names = [name for key in keys for name in (manifest_file(*key), trash_file(*key))]
    present = objects.present(names)
    return [key for key in keys if present.intersection((manifest_file(*key), trash_file(*key)))]


def certain_holder(
    step: int,
    lease: Lease | None,
    attempts: AttemptsFound,
    published: Collection[StepKey],
    deleted: Collection[StepKey],
) -> int | None:
    """The attempt that holds a step which is listed for certain; None: ask the whole history.

    Args:
        step: the step.
        lease: as it was read, before attempts.
        attempts: of the run.
        published: (step, attempt) of every manifest of this one step, and of those of `overwriting`
            that there are, tombstones among these.
        deleted: the same of its tombstones, from the newest attempt that has published it on.
    """
    if lease is None or attempts.problems or not published:
        return None
    noted = lease.durable
    if noted is not None and noted[0] == step and noted not in published:
        return None  # it is lost
    attempt = counting(published, attempts.known).get(step)
    if attempt is None:
        return None
    later = {(step, one.number) for one in attempts.known if one.number >= attempt}
    gone = later.intersection(deleted)
    told = told_steps(attempts.known, published if noted is None else [*published, noted])
    needed = later | overwriting((step, attempt), attempts.known)
    if told.intersection(needed).difference(published, gone):
        return None  # one that had overwritten this one is lost
    # One that was deleted does not give its place back to what it had overwritten.
    holder = counting([*published, *gone], attempts.known).get(step)
    return attempt if holder == attempt and (step, attempt) not in gone else None


def judge_lease(objects: ObjectStore) -> tuple[Lease | None, dict[str, StorageError]]:
    """The lease, and what is wrong with it."""
    return _parsed_lease(objects, objects.read(LEASE_FILE))


def _parsed_lease(
    objects: ObjectStore, stored: Versioned | None
) -> tuple[Lease | None, dict[str, StorageError]]:
    try:
        lease = None if stored is None else parse_record(objects, LEASE_FILE, Lease, stored)
    except UNREADABLE as exc:
        return None, {LEASE_FILE: exc}
    return lease, {}


class Look(NamedTuple):
    """What one round of requests found of a run.

    Attributes:
        lease: its record, as stored.
        published: (step, attempt) of every manifest, by step.
        attempts: names of the records of attempts; None: they were not listed.
        folders: names of the folders of attempts.
    """

    lease: Versioned | None
    published: list[StepKey]
    attempts: list[str] | None
    folders: list[str]

    @property
    def is_empty(self) -> bool:
        """Nobody has begun here: who does takes the lease first."""
        return not (self.lease or self.published or self.folders) and self.attempts == []


def seen_in(
    objects: ObjectStore, look: Look, history: History, latest: StepKey | None
) -> Seen | None:
    """What a start may rest on that takes the lease next, if it is still the one that was seen.

    Args:
        objects: the run's objects.
        look: at the run.
        history: since then, by `history_since`.
        latest: the last step that is listed.
    """
    lease, _ = _parsed_lease(objects, look.lease)
    if lease is None and (history.published or history.attempts.known or look.folders):
        return None  # it is lost: a writer that had it may still publish
    newest = [(one.number, one.base_step) for one in history.attempts.known[-1:]]
    return Seen(
        lease,
        None if look.lease is None else look.lease.generation,
        newest[0] if newest else (0, -1),
        highest_number(look.attempts or [], look.folders),
        -1 if latest is None else latest,
    )


def look_at(objects: ObjectStore) -> Look:
    """What there is of a run, of which nothing is parsed; in one round."""
    lease, published, entries = objects.at_once(
        lambda: objects.read(LEASE_FILE),
        lambda: published_steps(objects),
        lambda: objects.entries(ATTEMPTS),
    )
    return Look(lease, published, *entries)


def read_history(objects: ObjectStore, look: Look | None = None) -> History:
    """The steps of a run, from names and the records of attempts and the lease alone.

    Args:
        objects: the run's objects.
        look: what was found of it just now, if it was looked at: one round instead of three, for
            one request more.
    """
    if look is None:
        lease, published = objects.at_once(
            lambda: objects.read(LEASE_FILE), lambda: published_steps(objects)
        )
        look = Look(lease, published, None, [])
    found = history_since(objects, look)
    return _in_order(objects) if found is None else found


def history_since(objects: ObjectStore, look: Look) -> History | None:
    """The steps of a run that was looked at just now; None: read it anew.

    A round asks everything at once, and so in no order. What is found counts only if it is as if it
    had been asked in the order of `read_history`: manifests after the lease, since they show what
    it names; attempts after manifests, since they are listed once more; tombstones after manifests,
    which go before them.
    """
    lease, problems = _parsed_lease(objects, look.lease)
    noted = None if lease is None else lease.durable
    begun = None if lease is None else lease.begun
    if problems or (noted is not None and noted not in look.published):
        return None
    deleted, attempts, again = objects.at_once(
        lambda: trashed_steps(objects),
        lambda: judge_attempts(objects, begun, look.published, look.attempts),
        lambda: None if look.attempts is None else objects.children(ATTEMPTS),
    )
    told = told_steps(attempts.known, look.published if noted is None else [*look.published, noted])
    if (
        again != look.attempts
        or attempts.problems
        or not {number for _, number in deleted} <= {one.number for one in attempts.known}
        or _missed(look.published, deleted, attempts.known, told, noted)
    ):
        return None
    history = History(tuple(look.published), frozenset(deleted), frozenset(), attempts, {})
    return _with_doubts(objects, history)


def _in_order(objects: ObjectStore) -> History:
    """The same whatever is amiss or goes on meanwhile, one request after the other.

    Everything that the lease names was there before: so it is read first. Then manifests before
    tombstones, which go after them, and both before attempts, so that the attempt that wrote one is
    among those that judge it.
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
        if noted in deleted.difference(published) and misplaced(objects, trash_file(*noted)):
            deleted.discard(noted)
        told = told_steps(attempts.known, published if noted is None else [*published, noted])
        told.update(_left_by(attempts, published, objects))
        attempts = _with_what_steps_tell(attempts, told | deleted.union(published), objects)
        for key in sorted(_missed(published, deleted, attempts.known, told, noted)):
            # By their names: a store may show an old list.
            manifest, trash, forgotten = manifest_file(*key), trash_file(*key), forgotten_file(*key)
            found = objects.read_many([manifest, trash, forgotten])
            if found[manifest] is not None:
                published = sorted([*published, key])
            elif found[trash] is not None and misplaced(objects, trash) is None:
                deleted.add(key)
            elif key == noted or found[forgotten] is None:
                lost.add(key)
                problems[manifest] = _lost(objects, key)
        problems.update(attempts.problems)
        history = History(tuple(published), frozenset(deleted), frozenset(lost), attempts, problems)
        history = _with_doubts(objects, history)
        if not history.problems or judge_lease(objects)[0] == lease:
            break  # else somebody has removed what the lease named then
    assert history is not None
    return history


def _with_doubts(objects: ObjectStore, history: History) -> History:
    """With what is wrong with the tombstones by which a step is not the latest: one look each."""
    names = {key: trash_file(*key) for key in _hidden(history)}
    wrong = {key: error for key, name in names.items() if (error := misplaced(objects, name))}
    problems = {names[key]: error for key, error in wrong.items()}
    return replace(history, problems={**history.problems, **problems}, doubted=frozenset(wrong))


def _hidden(history: History) -> Iterator[StepKey]:
    """Steps above all that are listed, each of which would be if it were not deleted."""
    if not history.deleted:
        return
    published = set(history.published)
    held = counting(history.deleted | published, history.attempts.known)
    for key in reversed(held.items()):
        if key not in history.deleted:
            return
        if key in published:
            yield key


def _left_by(
    attempts: AttemptsFound, published: list[StepKey], objects: ObjectStore
) -> Iterator[StepKey]:
    """Steps that attempts have saved of which the record is amiss, by their folders.

    Each was published if a later one of the same attempt was: they only go up, and no attempt goes
    on after a save that failed.
    """
    last = {number: step for step, number in published}
    for name in attempts.problems:
        number = parse_attempt_file(name)
        if number is None or number not in last:
            continue
        for folder in objects.folders(attempt_dir(number)):
            found = parse_step_folder(folder.rpartition("/")[2])
            if found is None or found.temporary or found.step >= last[number]:
                continue
            if objects.read(f"{folder}/{COMMIT_FILE}") is not None:
                yield found.step, number


def _with_what_steps_tell(
    attempts: AttemptsFound, saved: Collection[StepKey], objects: ObjectStore
) -> AttemptsFound:
    """Of attempts whose records are amiss, which step they have overwritten, and whose they kept.

    None saves a step up to its base step but one that was begun to overwrite it, and no other
    before. Of the copies of its base step it kept the last. Where the first of these steps has a
    record that is not its own, it may have been saved, or never: nothing tells what that attempt
    has overwritten, and it is unknown.
    """

    def filled(one: Attempt) -> Attempt | None:
        if attempt_file(one.number) not in attempts.problems:
            return one
        own = sorted(step for step, number in saved if number == one.number)
        first = next((step for step in own if step <= one.base_step), None)
        if first is not None and not _is_in_place(objects, (first, one.number)):
            return None
        kept = [number for step, number in saved if step == one.base_step and number < one.number]
        return replace(one, overwrites=first, base_attempt=max(kept, default=None))

    completed = {one.number: filled(one) for one in attempts.known}
    ambiguous = [number for number, attempt in completed.items() if attempt is None]
    return attempts._replace(
        known=[attempt for attempt in completed.values() if attempt is not None],
        unknown=sorted([*attempts.unknown, *ambiguous]),
    )


def _is_in_place(objects: ObjectStore, key: StepKey) -> bool:
    names = manifest_file(*key), trash_file(*key)
    return all(misplaced(objects, name) is None for name in names)


def _missed(
    published: list[StepKey],
    deleted: set[StepKey],
    attempts: list[Attempt],
    told: set[StepKey],
    noted: StepKey | None,
) -> set[StepKey]:
    """Steps that were published once and that no list shows, and that would matter if they were.

    Of one that had overwritten another the tombstone stays for as long as that is there, see
    `end_removal`; of others nothing need be left.
    """
    shown = deleted.union(published)
    told = told - shown
    missed = set()
    if told:
        counts = counting(published, attempts)
        is_aside = set_aside(attempts, published)
        overwrites = {one.number: one.overwrites for one in attempts}

        def has_overwritten(step: int, number: int) -> bool:
            """Whether there is something that would count if that one had not been."""
            if counts.get(step, number) < number:
                return True
            later = (one for other, one in counts.items() if other > step)
            return overwrites.get(number) == step and any(one < number for one in later)

        missed = {key for key in told if not is_aside(*key) and has_overwritten(*key)}
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
