"""The best step of a run by a metric."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal

from cairn.storage.errors import PolicyError, StepNotFoundError
from cairn.storage.runs.retention import StepFacts, ranked, step_facts
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo

__all__ = ["best_step"]


def best_step(run: Run, metric: str, mode: Literal["min", "max"] | None) -> StepInfo:
    """The listed step with the best value of a metric; of equal ones the latest.

    Args:
        run: the run.
        metric: its name; steps without it, or whose value is NaN, are never the best.
        mode: "min" if small values are good, such as a loss; else "max".

    Raises:
        PolicyError: `mode` is neither: nothing tells which values are good.
        StepNotFoundError: no listed step has a value of this metric; names those that they have.
        UnsupportedFormatError, CorruptionError: a manifest or an annotation can't be read.
    """
    if mode not in ("min", "max"):
        raise PolicyError(
            "whether small or large values are good is not said",
            path=f"best:{metric}",
            expected="'min' or 'max'",
            found=repr(mode),
            next_step=f"Ask for best:{metric}:min or best:{metric}:max.",
        )
    steps = {(info.step, info.attempt): info for info in run.steps()}
    facts = step_facts(run, steps.values())
    best = ranked(facts, metric, mode)
    if not best:
        raise _no_value(run, metric, facts)
    return steps[best[0]]


def _no_value(run: Run, metric: str, facts: Iterable[StepFacts]) -> StepNotFoundError:
    known = sorted({name for one in facts for name in one.metrics})
    near = get_close_matches(metric, known, n=1)
    return StepNotFoundError(
        "no step has a value of this metric",
        path=run.uri,
        expected=f"a listed step with a number as {metric!r}",
        found=f"steps with {', '.join(map(repr, known))}" if known else "steps without metrics",
        next_step=f"Did you mean {near[0]!r}?"
        if near
        else "Give one of these, or the number of a step.",
    )
