"""What the records of a run say of its steps, at one moment: which count, and what is amiss.

One record that is lost, damaged or in another's place is missed by the others: an attempt by the
one after it and by the lease, the step that was reported durable last by the lease. What the rest
still says for certain is judged; what it does not is never guessed.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from cairn.storage.errors import CorruptionError, StorageError
from cairn.storage.runs.records import (
    LEASE_FILE,
    MANIFESTS,
    MAX_NUMBER,
    TRASH,
    UNREADABLE,
    Attempt,
    AttemptsFound,
    Lease,
    attempt_file,
    counting,
    judge_attempts,
    manifest_file,
    parse_manifest_file,
    parse_trash_file,
    read_lease,
    trash_file,
)
from cairn.storage.runs.step_states import StepState
from cairn.storage.store import ObjectStore

__all__ = ["History", "StepKey", "judge_lease", "published_steps", "read_history", "trashed_steps"]

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
        lost: the step that was reported durable last, if its manifest is gone and no tombstone
            says why.
        attempts: every attempt, as far as they are known.
        problems: what is wrong with records that steps are judged by, by name.
    """

    published: tuple[StepKey, ...]
    deleted: frozenset[StepKey]
    lost: StepKey | None
    attempts: AttemptsFound
    problems: Mapping[str, StorageError]

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

    def without(self, key: StepKey | None) -> "History":
        """The history as it would be if the step `key` had never been published."""
        published = tuple(one for one in self.published if one != key)
        return replace(self, published=published, lost=None if self.lost == key else self.lost)

    def latest(self) -> StepKey | None:
        """The highest listed step, None without any.

        Raises:
            UnsupportedFormatError, CorruptionError: it can't be told which that is.
        """
        judged = self.states()
        kept = (StepState.LISTED, StepState.UNJUDGED)
        highest = max((key for key, state in judged if state in kept), default=None)
        if self.lost is not None and (highest is None or self.lost[0] >= highest[0]):
            self.require_judged(self.lost[0])
        if highest is not None:
            self.require_judged(highest[0])
        return highest

    def require_judged(self, step: int) -> None:
        """Raise if it can't be told what holds `step`.

        Raises:
            UnsupportedFormatError, CorruptionError: it can't be.
        """
        least, most = self._holders()
        if self.lost is not None and self.lost in ((step, least.get(step)), (step, most.get(step))):
            raise self.problems[manifest_file(*self.lost)]
        if least.get(step) != most.get(step):
            raise next(self.problems[attempt_file(one)] for one in self.attempts.unknown)

    def _holders(self) -> tuple[dict[int, int], dict[int, int]]:
        """Which attempt holds each step, if unknown attempts set aside nothing, or all they can.

        Where both agree, so does whatever they did set aside.
        """
        saved = self.deleted.union(self.published, () if self.lost is None else (self.lost,))
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


def judge_lease(objects: ObjectStore) -> tuple[Lease | None, dict[str, StorageError]]:
    """The lease, and what is wrong with it."""
    try:
        return read_lease(objects), {}
    except UNREADABLE as exc:
        return None, {LEASE_FILE: exc}


def read_history(objects: ObjectStore) -> History:
    """The steps of a run, from names and the records of attempts and the lease alone.

    Everything that the lease names was there before: so it is read first. Then manifests before
    attempts, so that the attempt that wrote a manifest is among those that judge it.
    """
    history = None
    for _ in range(_LOOKS):
        lease, problems = judge_lease(objects)
        published = published_steps(objects)
        # An older release did not clear what it removed, and did not note what it began.
        noted = None if lease is None or lease.begun is None else lease.durable
        attempts = judge_attempts(objects, None if lease is None else lease.begun)
        deleted = trashed_steps(objects)
        lost = None
        if noted is not None and noted not in published and noted not in deleted:
            # By their names: a store may show an old list.
            found = objects.read_many([manifest_file(*noted), trash_file(*noted)])
            if found[manifest_file(*noted)] is not None:
                published = sorted([*published, noted])
            elif found[trash_file(*noted)] is not None:
                deleted.add(noted)
            else:
                lost = noted
                problems[manifest_file(*noted)] = _lost(objects, noted)
        problems.update(attempts.problems)
        history = History(tuple(published), frozenset(deleted), lost, attempts, problems)
        if not history.problems or judge_lease(objects)[0] == lease:
            break  # else somebody has removed what the lease named then
    assert history is not None
    return history


def _lost(objects: ObjectStore, key: StepKey) -> CorruptionError:
    return CorruptionError(
        "the manifest of a durable step is lost",
        path=objects.uri / manifest_file(*key),
        expected=f"the manifest of step {key[0]}, which was reported durable, or a tombstone",
        found="neither",
        next_step="Restore it from a backup, see what `cairn repair` can do, or roll back to an "
        "earlier step to go on without it.",
    )
