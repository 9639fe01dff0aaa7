"""Which step a reference means: by number, alias or metric."""

import os
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from typing import Final

from cairn.storage.errors import PolicyError, StepNotFoundError
from cairn.storage.runs.records import Better, CheckpointRef, parse_ref
from cairn.storage.runs.retention import StepFacts, noted_better, ranked, step_facts
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store import StoreURI

__all__ = ["best_step", "resolve_checkpoint", "resolve_step"]

_MODES: Final[tuple[Better, ...]] = ("min", "max")


def resolve_checkpoint(text: StoreURI | str | os.PathLike[str]) -> tuple[Run, StepInfo]:
    """The run and the step that a reference names, see `parse_ref`.

    Raises:
        InvalidURIError: the text is malformed.
        RunNotFoundError: there is no such run.
        AliasNotFoundError: there is no such alias.
        StepNotFoundError: there is no such step.
        StepInFlightError: the step is being written now.
        PolicyError: it is the best by a metric of which nobody said which values are good.
    """
    ref = parse_ref(text)
    run = Run.open(ref.run)
    return run, resolve_step(run, ref)


def resolve_step(run: Run, ref: CheckpointRef) -> StepInfo:
    """The step that `ref` names; an alias keeps its step even when that was set aside.

    Raises:
        AliasNotFoundError: there is no such alias.
        StepNotFoundError: there is no such step, or none at all.
        StepInFlightError: it is being written now.
        PolicyError: it is the best by a metric of which nobody said which values are good.
    """
    if ref.best is None:
        return run.resolve(ref)
    for mode in _MODES:
        if ref.best.endswith(f":{mode}"):
            return best_step(run, ref.best.removesuffix(f":{mode}"), mode)
    return best_step(run, ref.best, None)


def best_step(run: Run, metric: str, mode: Better | None) -> StepInfo:
    """The listed step with the best value of a metric; of equal ones the latest.

    Args:
        run: the run.
        metric: its name; steps without it, or whose value is NaN, are never the best.
        mode: "min" if small values are good, such as a loss; "max" if large ones are; None: as the
            steps say themselves.

    Raises:
        PolicyError: `mode` is something else, steps say otherwise, or nothing tells which values
            are good.
        StepNotFoundError: no listed step has a value of this metric; names those that they have.
        UnsupportedFormatError, CorruptionError: a manifest or an annotation can't be read.
    """
    steps = {(info.step, info.attempt): info for info in run.steps()}
    facts = step_facts(run, steps.values())
    best = ranked(facts, metric, _better(run, metric, mode, noted_better(facts, metric)))
    if not best:
        raise _no_value(run, metric, facts)
    return steps[best[0]]


def _better(run: Run, metric: str, mode: Better | None, noted: Collection[Better]) -> Better:
    said = " and ".join(map(repr, sorted(noted)))
    if len(noted) > 1 or (noted and mode is not None and mode not in noted):
        raise PolicyError(
            "steps say otherwise which values of a metric are good",
            path=f"{run.uri}@best:{metric}",
            expected="one direction" if mode is None else repr(mode),
            found=said,
            next_step="Ask for the best as the steps say, or correct what they say: "
            "`cairn annotate`.",
        )
    if mode is None and noted:
        return next(iter(noted))
    if mode not in ("min", "max"):
        raise PolicyError(
            "whether small or large values are good is not said",
            path=f"best:{metric}",
            expected="'min' or 'max'",
            found=repr(mode),
            next_step=f"Ask for best:{metric}:min or best:{metric}:max.",
        )
    return mode


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
