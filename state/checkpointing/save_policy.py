"""Save policies, which decide whether to save a step. Pure: all facts are passed in.

A step is saved if any rule of the policy applies to it. Rules on numbers also work if training
reports only some steps: `every_steps=100` saves the first reported step at or after each multiple
of 100.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal

from cairn.storage.errors import InvalidURIError, PolicyError
from cairn.storage.runs.records.layout import check_step
from cairn.storage.runs.retention import BestSteps
from cairn.storage.store.clock import is_above_zero

__all__ = ["BestSoFar", "DueReason", "SaveFacts", "SavePolicy"]

_SECONDS_PER_MINUTE: Final = 60.0


class DueReason(StrEnum):
    """Reason for saving a step.

    preemption: the process was signalled to end.
    asked: the caller requested a save of this step.
    at_step: the step is the first at or after one of the policy's `at_steps`.
    every_steps: the step is the first at or after a multiple of `every_steps`.
    every_minutes: the last save began at least `every_minutes` ago.
    best: the step is among the best by a metric.
    """

    PREEMPTION = "preemption"
    ASKED = "asked"
    AT_STEP = "at_step"
    EVERY_STEPS = "every_steps"
    EVERY_MINUTES = "every_minutes"
    BEST = "best"


@dataclass(frozen=True, kw_only=True)
class SaveFacts:
    """Facts by which a policy decides whether to save a step.

    Attributes:
        step: the step that could be saved.
        previous: the step of the previous decision; None at the first.
        seconds: seconds since the last save began; before the first, since training began.
        metrics: the step's metrics, by name.
        best: values of the metric of `SavePolicy.best` at the best steps so far.
        preempted: True if the process was signalled to end, and no step was saved since.
    """

    step: int
    previous: int | None = None
    seconds: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Collection[float] = ()
    preempted: bool = False


@dataclass(frozen=True, kw_only=True)
class SavePolicy:
    """Rules for when to save. A step is saved if any rule applies to it.

    Attributes:
        every_steps: save the first step at or after each multiple of this number; None: no rule.
        every_minutes: save the first step that comes this many minutes after the last save began,
            whatever its reason; before the first save, after training began. None: no rule.
        at_steps: save the first step at or after each of these.
        best: keep saving the best steps by a metric: save a step if fewer than `best.count` were
            saved, or if it is better than the worst of the best so far. Equal is not better.
        on_preemption: save the current step when the process is signalled to end (SIGTERM).
        deadline_seconds: seconds from that signal until the save is abandoned if it is not
            durable. Choose some seconds less than your scheduler grants.
        when_busy: what to do if a step is due while an earlier save runs: "wait" blocks training
            until that save is durable, "supersede" does not save the step. Saves on preemption
            and saves that the caller requests always wait.

    Raises:
        PolicyError: a value is no number or not above 0, a mode is unknown, or there is no rule;
            all problems are listed.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    at_steps: Collection[int] = ()
    best: BestSteps | None = None
    on_preemption: bool = True
    deadline_seconds: float = 25.0
    when_busy: Literal["wait", "supersede"] = "wait"

    def __post_init__(self) -> None:
        best: Any = self.best if isinstance(self.best, BestSteps) else None
        problems = [
            f"{name} is {value!r}, expected an integer of 1 or more"
            for name, value in [
                ("every_steps", self.every_steps),
                ("best.count", None if best is None else best.count),
            ]
            if value is not None and (type(value) is not int or value < 1)
        ]
        problems += [
            f"{name} is {value!r}, expected a number above 0"
            for name, value in [
                ("every_minutes", self.every_minutes),
                ("deadline_seconds", self.deadline_seconds),
            ]
            if value is not None and not is_above_zero(value)
        ]
        steps: Any = self.at_steps
        try:
            at_steps = frozenset(map(check_step, steps))
        except (TypeError, InvalidURIError):
            at_steps = frozenset()
            problems.append(f"at_steps is {steps!r}, expected a list of integers from 0")
        if self.best is not best:
            problems.append(f"best is {self.best!r}, expected a BestSteps")
        if best is not None and (not isinstance(best.metric, str) or not best.metric):
            problems.append(f"best has a metric without a name: {best.metric!r}")
        if best is not None and best.mode not in ("min", "max"):
            problems.append(f"best mode is {best.mode!r}, expected 'min' or 'max'")
        if self.when_busy not in ("wait", "supersede"):
            problems.append(f"when_busy is {self.when_busy!r}, expected 'wait' or 'supersede'")
        rules = (self.every_steps, self.every_minutes, self.best)
        if not (self.on_preemption or at_steps or any(rule is not None for rule in rules)):
            problems.append("no rule ever saves")
        if problems:
            raise PolicyError(
                "the save policy can't act",
                expected="rules that can act",
                found="; ".join(problems),
                next_step="Correct these, or leave them out.",
            )
        object.__setattr__(self, "at_steps", at_steps)

    def due(self, facts: SaveFacts) -> DueReason | None:
        """Return the first reason to save the step, in `DueReason`'s order; None: don't save."""
        if self.on_preemption and facts.preempted:
            return DueReason.PREEMPTION
        by_number = self.due_by_number(facts.step, facts.previous)
        if by_number is not None:
            return by_number
        minutes = self.every_minutes
        if minutes is not None and facts.seconds >= minutes * _SECONDS_PER_MINUTE:
            return DueReason.EVERY_MINUTES
        if self.best is not None and BestSoFar(self.best, facts.best).beaten_by(facts.metrics):
            return DueReason.BEST
        return None

    def due_by_number(self, step: int, previous: int | None) -> DueReason | None:
        """Return the reason to save by step numbers alone; None: no such rule applies.

        All processes get the same result, which need not be true of times and metrics.

        Args:
            step: the step that could be saved.
            previous: the step of the previous decision; None at the first.
        """
        before = step - 1 if previous is None else previous
        if any(before < at_step <= step for at_step in self.at_steps):
            return DueReason.AT_STEP
        every = self.every_steps
        if every is not None and step // every > before // every:
            return DueReason.EVERY_STEPS
        return None


class BestSoFar:
    """Best values of a metric so far. NaN is ignored.

    Args:
        rule: the metric, its direction, and how many values to keep.
        values: initial values, in any order; more than `rule.count` are allowed.
    """

    def __init__(self, rule: BestSteps, values: Collection[float] = ()) -> None:
        self._rule = rule
        self._sign = 1.0 if rule.mode == "min" else -1.0
        self._costs: list[float] = []
        for value in values:
            self._keep(value)

    @property
    def values(self) -> tuple[float, ...]:
        """The best values, best first."""
        return tuple(self._sign * cost for cost in self._costs)

    def beaten_by(self, metrics: Mapping[str, float]) -> bool:
        """Return True if a step with these metrics would be among the best."""
        cost = self._sign * float(metrics.get(self._rule.metric, math.nan))
        if math.isnan(cost):
            return False
        return len(self._costs) < self._rule.count or cost < self._costs[-1]

    def add(self, metrics: Mapping[str, float]) -> None:
        """Add the metric of a step that was saved, for whatever reason, if it is among the best."""
        self._keep(float(metrics.get(self._rule.metric, math.nan)))

    def _keep(self, value: float) -> None:
        if not math.isnan(value):
            self._costs = sorted([*self._costs, self._sign * value])[: self._rule.count]
