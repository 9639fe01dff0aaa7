"""Rollback and take-over: attempts that save nothing.

A rollback makes an earlier step the latest; later steps are superseded, not deleted. The step is
marked as in use meanwhile, so that it is not deleted.

A take-over ends a writer's attempt, so that another writer may begin at once. Listed steps stay
listed. Steps that the old writer publishes later do not count: its next save raises an error.
"""

import contextlib
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import SupportsIndex

from cairn.storage.errors import (
    PreconditionFailedError,
    StepNotFoundError,
    StorageError,
    StoreUnavailableError,
)
from cairn.storage.runs.damage import damage_of, refuse_damaged
from cairn.storage.runs.history import read_history
from cairn.storage.runs.lease import begin_attempt, read_lease, release
from cairn.storage.runs.records.attempts import Attempt, Kept, counting
from cairn.storage.runs.records.layout import attempt_file, check_step
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.runs.trash import held

__all__ = [
    "Rollback",
    "TakeOver",
    "last_to_keep",
    "roll_back",
    "stranded_aliases",
    "take_over",
]


@dataclass(frozen=True)
class Rollback:
    """Result of a rollback.

    Attributes:
        step: the step that is the latest now.
        attempt: the attempt that began with it.
        superseded: the steps that counted before and are superseded now.
        aliases: names of the aliases that point to a superseded step; they stay.
    """

    step: int
    attempt: int
    superseded: tuple[int, ...]
    aliases: tuple[str, ...]


def roll_back(
    run: Run,
    step: StepInfo | SupportsIndex,
    *,
    by: str,
    request: str | None = None,
    strand: Collection[str] | None = None,
    despite_damage: str | None = None,
) -> Rollback:
    """Make a listed step the latest; the steps after it are superseded.

    Args:
        run: the run, whose lease no writer holds.
        step: one of its listed steps.
        by: the caller's name. The attempt's writer id is this, a slash and the request's id.
        request: id of this rollback, for callers that may repeat the call: an interrupted rollback
            then continues, and a finished one returns its result again. None: every call makes a
            new rollback.
        strand: aliases that may stay on a superseded step; None: any.
        despite_damage: why to go back to the step though it is damaged. It is not stored here; the
            caller's audit log must record it.

    Raises:
        StepDamagedError: the step's last verification has failed, and no reason is given.
        StepNotFoundError: the step is not listed (any more), or another attempt holds it.
        StepChangedError: the step is about to be deleted.
        LeaseHeldError: a writer holds the run.
        PreconditionFailedError: the request was used for another step; or an alias that is not in
            `strand` would be left on a superseded step.
        StoreCheckError: the store does not keep the promises that runs depend on.
        StoreUnavailableError: the store failed; the message says whether the run was rolled back.
    """
    number = step.step if isinstance(step, StepInfo) else check_step(step)
    # Never `by` alone: a job with that id would lose its lease, and its attempt would seem to be
    # this rollback's.
    writer = f"{by}/{secrets.token_hex(8) if request is None else request}"
    attempt = None if request is None else _begun(run, writer, number, request)
    if attempt is None:
        listed = run.step(number)
        _refuse_other(run, step, listed)
        key = number, listed.attempt
        noted = partial(damage_of, run, key)
        with held(run, key, by=by, reason="roll back to it", beside=noted) as damage:
            refuse_damaged(run, listed, despite_damage=despite_damage, damage=damage)
            attempt = _begin(run, listed, writer, strand)
    with contextlib.suppress(StorageError):  # otherwise the lease expires by itself
        release(run.objects, attempt, clock=run.clock)
    try:
        aside = _superseded_by(run, attempt)
        stranded = stranded_aliases(run, number)
    except StorageError as exc:
        raise StoreUnavailableError(
            "the run has gone back, and the store fails to tell what that has superseded",
            path=run.uri,
            expected="records of its steps, attempts and aliases",
            found=str(exc),
            next_step=f"See its steps once the store is well: step {number} is the latest.",
        ) from exc
    return Rollback(number, attempt.number, tuple(aside), tuple(stranded))


def stranded_aliases(run: Run, step: int, accepted: Collection[str] = ()) -> dict[str, int]:
    """Return alias -> step for aliases of steps after `step`; `accepted` ones are left out."""
    stranded = {alias.alias: alias.step for alias in run.aliases.list() if alias.step > step}
    return {alias: stranded[alias] for alias in sorted(stranded) if alias not in accepted}


def _begun(run: Run, writer: str, step: int, request: str) -> Attempt | None:
    """Return the attempt that an earlier call with the same request began, or None."""
    attempt = next((attempt for attempt in run.attempts() if attempt.writer == writer), None)
    if attempt is not None and attempt.base_step != step:
        raise PreconditionFailedError(
            "the request was used for another step",
            path=run.uri,
            expected=f"step {attempt.base_step}, to which request {request!r} went back",
            found=f"step {step}",
            next_step="Give each rollback a request of its own, or none.",
        )
    if attempt is not None:
        run.objects.sync(attempt_file(attempt.number))
    return attempt


def _begin(run: Run, listed: StepInfo, writer: str, strand: Collection[str] | None) -> Attempt:
    def base_step() -> tuple[int, int]:
        """Return the step to keep; the lease is held, so that no writer can supersede it."""
        _refuse_other(run, listed, run.step(listed.step))
        if strand is not None:
            _refuse_stranded(run, listed.step, strand)
        return listed.step, listed.attempt

    return begin_attempt(run.objects, writer=writer, base_step=base_step, clock=run.clock)


def _refuse_other(run: Run, step: StepInfo | SupportsIndex, listed: StepInfo) -> None:
    if not isinstance(step, StepInfo) or step.attempt == listed.attempt:
        return
    raise StepNotFoundError(
        "the step was saved anew",
        path=run.step_uri(step),
        expected=f"step {step.step} of attempt {step.attempt}",
        found=f"that of attempt {listed.attempt}",
        next_step="Look at the new one, and roll back to it if it is what you want.",
    )


def _refuse_stranded(run: Run, step: int, accepted: Collection[str]) -> None:
    if stranded := stranded_aliases(run, step, accepted):
        raise PreconditionFailedError(
            "the rollback would supersede what an alias names",
            path=run.uri,
            expected=f"no alias of a step after {step} but those that were said to stay",
            found=", ".join(f"{alias} (step {at})" for alias, at in stranded.items()),
            next_step="Promote another step first, or name these aliases as well.",
        )


def _superseded_by(run: Run, attempt: Attempt) -> list[int]:
    """Return the steps that `attempt` superseded; repeated calls return the same."""
    published, deleted = run.published(), run.trashed()
    saved = [key for key in deleted.union(published) if key[1] < attempt.number]
    earlier = [other for other in run.attempts() if other.number < attempt.number]
    return [
        step
        for step, number in counting(saved, earlier).items()
        if step > attempt.base_step and (step, number) not in deleted
    ]


@dataclass(frozen=True)
class TakeOver:
    """Result of a take-over.

    Attributes:
        writer: id of the writer that held the run.
        ended: number of that writer's attempt.
        attempt: number of the attempt that began, and ended, in its place.
        latest_step: the latest listed step, which stays listed; None if there is none.
    """

    writer: str
    ended: int
    attempt: int
    latest_step: int | None


def take_over(run: Run, attempt: int, *, by: str) -> TakeOver:
    """End the attempt of the writer that holds the run, dead or alive.

    Args:
        run: the run.
        attempt: number of the attempt that held the run when the caller looked.
        by: the caller's name, with which the writer id of the new attempt begins.

    Raises:
        PreconditionFailedError: no writer holds the run, or another attempt does.
        LeaseHeldError: another attempt took the run meanwhile.
        StoreCheckError: the store does not keep the promises that runs depend on.
    """
    lease = read_lease(run.objects)
    if lease is None or not lease.is_alive(run.clock()) or lease.attempt != attempt:
        is_held = lease is not None and lease.is_alive(run.clock())
        raise PreconditionFailedError(
            "the run is not held as it was seen",
            path=run.uri,
            expected=f"a writer that holds it by attempt {attempt}",
            found=f"{lease.writer}, by attempt {lease.attempt}" if lease and is_held else "none",
            next_step="Look again who holds it; where nobody does, a job may begin at once.",
        )
    begun = begin_attempt(
        run.objects,
        writer=f"{by}/{secrets.token_hex(8)}",
        base_step=lambda: last_to_keep(run),
        clock=run.clock,
        ends=attempt,
    )
    with contextlib.suppress(StorageError):  # else the lease expires by itself
        release(run.objects, begun, clock=run.clock)
    latest = None if begun.base_step < 0 else begun.base_step
    return TakeOver(lease.writer, attempt, begun.number, latest)


def last_to_keep(run: Run) -> Kept:
    """Return (step, attempt) of the latest listed step at present; -1 if there is none."""
    latest = read_history(run.objects).latest()
    return -1 if latest is None else latest
