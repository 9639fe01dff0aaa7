"""Carry a retention policy out on a run: read the facts, decide, delete through the trash. No JAX.

`RunRetention` does so in the background of a training job, after each durable save.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from storage import exit_guard
from storage.annotations import Annotation
from storage.clock import Clock, from_rfc3339, utc_now
from storage.errors import StepInUseError, StorageError, translate
from storage.gc import collect_garbage
from storage.layout import annotation_file
from storage.retention import Decision, RetentionPolicy, StepFacts, StepKey, decide
from storage.run import Run, StepInfo
from storage.save_metrics import record_retention
from storage.trash import GRACE_SECONDS, delete_step, read_tombstones, undelete_step

__all__ = ["RetentionOutcome", "RunRetention", "apply_retention", "step_facts"]


@dataclass(frozen=True)
class RetentionOutcome:
    """What a pass of retention did.

    Attributes:
        decisions: one for each listed step.
        deleted: the steps that are now in the trash, as (step, attempt).
        in_use: those that were to go, and came into use meanwhile.
        errors: why others that were to go are still there.
    """

    decisions: tuple[Decision, ...]
    deleted: tuple[StepKey, ...] = ()
    in_use: tuple[StepKey, ...] = ()
    errors: tuple[StorageError, ...] = ()


def step_facts(run: Run, steps: Iterable[StepInfo] | None = None) -> list[StepFacts]:
    """What a decision needs to know of steps of a run.

    Args:
        run: the run.
        steps: which; by default every listed one.

    Raises:
        UnsupportedFormatError, CorruptionError: an annotation can't be read: it might have said to
            keep its step.
    """
    steps = run.steps() if steps is None else steps
    names = {annotation_file(info.step, info.attempt): info for info in steps}
    found = run.objects.parse_many(names, Annotation.parse)
    facts = []
    for name, info in names.items():
        notes = found.get(name) or Annotation()
        created = from_rfc3339(info.created or "")
        facts.append(StepFacts(info.step, info.attempt, created, notes.metrics, notes.labels))
    return facts


def apply_retention(
    run: Run,
    policy: RetentionPolicy,
    *,
    by: str,
    held: Collection[StepKey] = (),
    grace: float = GRACE_SECONDS,
    clock: Clock = utc_now,
) -> RetentionOutcome:
    """Delete the listed steps that a policy does not keep; each can be had back for a while.

    Args:
        run: the run.
        policy: what to keep.
        by: who asks.
        held: steps that somebody works with now, as (step, attempt).
        grace: seconds during which a deleted step can be had back.
        clock: tells the time.

    Raises:
        StorageError: the facts could not be read; nothing was deleted.
    """
    infos = {(info.step, info.attempt): info for info in run.steps()}
    facts = step_facts(run, infos.values())
    # Aliases after facts: one that was moved meanwhile is seen here, or by the deletion itself.
    aliases = {one.alias: (one.step, one.attempt) for one in run.aliases.list()}
    decisions = tuple(decide(facts, policy, now=clock(), aliases=aliases, held=held))
    deleted: list[StepKey] = []
    in_use: list[StepKey] = []
    errors: list[StorageError] = []
    for one in decisions:
        key = one.step, one.attempt
        if one.keep:
            continue
        try:
            delete_step(run, infos[key], by=by, reason="retention policy", grace=grace, clock=clock)
            if _was_latest(run, one.step):  # since it was judged
                undelete_step(run, *key)
                in_use.append(key)
            else:
                deleted.append(key)
        except StepInUseError:
            in_use.append(key)
        except StorageError as exc:
            errors.append(exc)
    return RetentionOutcome(decisions, tuple(deleted), tuple(in_use), tuple(errors))


def _was_latest(run: Run, step: int) -> bool:
    """Whether a step that was just deleted was the latest by then, of those that are listed."""
    latest = run.latest_step()
    return latest is None or latest < step


class RunRetention:
    """Applies a policy to a run in the background, one pass at a time. Never raises.

    Deleted steps go to the trash; once some have been there for the grace time, garbage is
    collected.

    Args:
        run: the run.
        policy: what to keep.
        by: who asks.
        grace: seconds during which a deleted step can be had back.
        clock: tells the time.
        told: called with what each pass did.
    """

    def __init__(
        self,
        run: Run,
        policy: RetentionPolicy,
        *,
        by: str,
        grace: float = GRACE_SECONDS,
        clock: Clock = utc_now,
        told: Callable[[RetentionOutcome], None] | None = None,
    ) -> None:
        self._run = run
        self._policy = policy
        self._by = by
        self._grace = grace
        self._clock = clock
        self._told = told
        self._lock = threading.Lock()
        self._wanted = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin a pass, or have another follow the one under way. Returns at once."""
        with self._lock:
            self._wanted = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="cairn-retention", daemon=True
                )
                self._thread.start()
                exit_guard.guard(self)

    def close(self) -> None:
        """Return once nothing is under way. What is started later needs another `close`."""
        exit_guard.release(self)
        thread = self._thread
        if thread is not None:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                self._wanted = False
            try:
                self._pass()
            except Exception as exc:
                record_retention(self._run.uri, errors=(translate(exc, path=self._run.uri),))

    def _pass(self) -> None:
        outcome = apply_retention(
            self._run, self._policy, by=self._by, grace=self._grace, clock=self._clock
        )
        record_retention(self._run.uri, deleted=len(outcome.deleted), errors=outcome.errors)
        if self._told is not None:
            self._told(outcome)
        now = self._clock()
        tombstones = read_tombstones(self._run.objects).values()
        if any(one.removing or one.has_expired(now) for one in tombstones):
            collect_garbage(self._run, by=self._by, clock=self._clock)
