"""Rollback: a run goes back to one of its steps; later ones are set aside, and none is deleted.

The step is held meanwhile, so that no deletion of it begins.
"""

from dataclasses import dataclass

from cairn.storage.errors import StepNotFoundError
from cairn.storage.runs.attempts import Attempt, counting
from cairn.storage.runs.lease import begin_attempt, release
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.runs.trash import held

__all__ = ["Rollback", "roll_back"]


@dataclass(frozen=True)
class Rollback:
    """What a rollback did.

    Attributes:
        step: the step that is the latest now.
        attempt: the attempt that began with it.
        set_aside: the steps that counted until then.
        aliases: names of those that point to a step that was set aside; they keep it.
    """

    step: int
    attempt: int
    set_aside: tuple[int, ...]
    aliases: tuple[str, ...]


def roll_back(run: Run, step: StepInfo | int, *, by: str) -> Rollback:
    """Make a listed step the latest; what a live writer saved after it is set aside.

    Args:
        run: the run.
        step: one of its listed steps.
        by: id of who asks, new for each rollback: with the same one an interrupted call goes on
            where it was, and one that was done is told again.

    Raises:
        StepNotFoundError: the step is not listed (any more), or another attempt holds it.
        StepChangedError: somebody is about to delete it.
        LeaseHeldError: a writer holds the run.
    """
    number = step if isinstance(step, int) else step.step
    begun = [attempt for attempt in run.attempts() if attempt.writer == by]
    attempt = begun[-1] if begun else None
    if attempt is None:
        listed = run.step(number)
        _refuse_other(run, step, listed)
        with held(run, (number, listed.attempt), by=by, reason="roll back to it"):
            attempt = _begin(run, listed, by)
    release(run.objects, attempt, clock=run.clock)
    aside = _set_aside_by(run, attempt)
    named = [one.alias for one in run.aliases.list() if one.step > number]
    return Rollback(number, attempt.number, tuple(aside), tuple(named))


def _begin(run: Run, listed: StepInfo, by: str) -> Attempt:
    def base_step() -> int:
        """Asked while the lease is held: no writer sets the step aside any more."""
        _refuse_other(run, listed, run.step(listed.step))
        return listed.step

    return begin_attempt(run.objects, writer=by, base_step=base_step, clock=run.clock)


def _refuse_other(run: Run, asked: StepInfo | int, listed: StepInfo) -> None:
    if isinstance(asked, int) or asked.attempt == listed.attempt:
        return
    raise StepNotFoundError(
        "the step was saved anew",
        path=run.step_uri(asked),
        expected=f"step {asked.step} of attempt {asked.attempt}",
        found=f"that of attempt {listed.attempt}",
        next_step="Look at the new one, and roll back to it if it is what you want.",
    )


def _set_aside_by(run: Run, attempt: Attempt) -> list[int]:
    """Steps that counted until `attempt` began; read off the store, however often it is asked."""
    published, deleted = run.published(), run.trashed()
    saved = [key for key in deleted.union(published) if key[1] < attempt.number]
    earlier = [other for other in run.attempts() if other.number < attempt.number]
    return [
        step
        for step, number in counting(saved, earlier).items()
        if step > attempt.base_step and (step, number) not in deleted
    ]
