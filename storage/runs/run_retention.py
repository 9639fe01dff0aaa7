"""Carry a retention policy out on a run: read the facts, decide, delete through the trash."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from cairn.storage.errors import StepInUseError, StorageError
from cairn.storage.runs.annotations import Annotation
from cairn.storage.runs.layout import annotation_file
from cairn.storage.runs.retention import Decision, RetentionPolicy, StepFacts, StepKey, decide
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.runs.trash import GRACE_SECONDS, delete_step, undelete_step
from cairn.storage.store import Clock, from_rfc3339, utc_now

__all__ = ["RetentionOutcome", "apply_retention", "step_facts"]


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
