"""Which steps of a run to keep: a pure decision, taken from facts that are passed in.

A step is kept if any rule of the policy keeps it, or if it must be kept whatever the policy says:
the latest step, a step that an alias names, one that somebody works with, and every step whose
bytes a kept step refers to. A policy without rules deletes nothing.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Literal

from cairn.storage.errors import PolicyError

__all__ = ["BestSteps", "Decision", "RetentionPolicy", "StepFacts", "decide"]

StepKey = tuple[int, int]
"""(step, attempt)."""


@dataclass(frozen=True, kw_only=True)
class BestSteps:
    """Keep the best steps by one metric.

    Attributes:
        metric: its name; steps without it, or whose value is NaN, are never among the best.
        count: how many to keep.
        mode: "min" if small values are good, such as a loss; else "max".
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """What to keep of a run. Rules add up: what one keeps, no other deletes.

    Attributes:
        keep_last: this many latest steps.
        keep_every: every step whose number is a multiple of this.
        keep_within: every step saved within this many seconds before now.
        keep_best: the best steps by some metrics.
        keep_labelled: every step with one of these labels: a name for any value, "name=value" for
            that value.

    Raises:
        PolicyError: a number below 1, an empty name, or a mode that does not exist; all are listed.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: float | None = None
    keep_best: Sequence[BestSteps] = ()
    keep_labelled: Sequence[str] = ()

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value!r}, expected an integer of 1 or more"
            for name, value in [
                ("keep_last", self.keep_last),
                ("keep_every", self.keep_every),
                *((f"keep_best[{best.metric!r}].count", best.count) for best in self.keep_best),
            ]
            if value is not None and (type(value) is not int or value < 1)
        ]
        within = self.keep_within
        if within is not None and not (within > 0 and math.isfinite(within)):
            problems.append(f"keep_within is {within!r}, expected seconds above 0")
        for best in self.keep_best:
            if not best.metric:
                problems.append("keep_best has a metric without a name")
            if best.mode not in ("min", "max"):
                problems.append(f"keep_best mode is {best.mode!r}, expected 'min' or 'max'")
        if any(not label.partition("=")[0] for label in self.keep_labelled):
            problems.append("keep_labelled has a label without a name")
        if problems:
            raise PolicyError(
                "the retention policy can't act",
                expected="rules that can act",
                found="; ".join(problems),
                next_step="Correct these, or leave them out.",
            )
        object.__setattr__(self, "keep_best", tuple(self.keep_best))
        object.__setattr__(self, "keep_labelled", tuple(self.keep_labelled))

    @property
    def deletes(self) -> bool:
        """Whether there is a rule at all; a policy without rules keeps everything."""
        numbers = (self.keep_last, self.keep_every, self.keep_within)
        return bool(self.keep_best or self.keep_labelled) or any(
            number is not None for number in numbers
        )


@dataclass(frozen=True)
class StepFacts:
    """What a decision needs to know of one listed step.

    Attributes:
        step: step number.
        attempt: the attempt that holds it.
        created: when it was saved.
        metrics: numbers by name.
        labels: text by name.
        needs: the steps that hold bytes of it.
    """

    step: int
    attempt: int
    created: datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    needs: frozenset[StepKey] = frozenset()

    @property
    def key(self) -> StepKey:
        """(step, attempt)."""
        return self.step, self.attempt


@dataclass(frozen=True)
class Decision:
    """What becomes of one step, and why.

    Attributes:
        step: step number.
        attempt: the attempt that holds it.
        reasons: what keeps it; empty if nothing does.
    """

    step: int
    attempt: int
    reasons: tuple[str, ...]

    @property
    def keep(self) -> bool:
        """Whether the step stays."""
        return bool(self.reasons)


def decide(
    steps: Iterable[StepFacts],
    policy: RetentionPolicy,
    *,
    now: datetime,
    aliases: Mapping[str, StepKey],
    held: Collection[StepKey] = (),
) -> list[Decision]:
    """Decide for each step whether it stays.

    Args:
        steps: every listed step, in any order.
        policy: what to keep.
        now: the present moment.
        aliases: (step, attempt) that each alias names.
        held: steps that somebody works with now.

    Returns:
        One decision per step, by step.
    """
    facts = sorted(steps, key=lambda one: one.key)
    reasons: dict[StepKey, list[str]] = {one.key: [] for one in facts}

    def keep(keys: Iterable[StepKey], reason: str) -> None:
        for key in keys:
            if key in reasons:
                reasons[key].append(reason)

    keep([one.key for one in facts[-1:]], "latest")
    for alias, key in sorted(aliases.items()):
        keep([key], f"alias {alias}")
    keep(sorted(set(held)), "in use")
    for key, reason in _by_rules(facts, policy, now):
        keep([key], reason)
    if not policy.deletes:
        keep(list(reasons), "no rule deletes")
    _keep_needed({one.key: one.needs for one in facts}, reasons)
    return [Decision(*key, tuple(texts)) for key, texts in reasons.items()]


def _by_rules(
    facts: Sequence[StepFacts], policy: RetentionPolicy, now: datetime
) -> Iterable[tuple[StepKey, str]]:
    if policy.keep_last is not None:
        for one in facts[-policy.keep_last :]:
            yield one.key, f"last {policy.keep_last}"
    for one in facts:
        if policy.keep_every is not None and one.step % policy.keep_every == 0:
            yield one.key, f"every {policy.keep_every}"
        within = policy.keep_within
        if within is not None and one.created >= now - timedelta(seconds=within):
            yield one.key, f"within {within:g} s"
        for label in policy.keep_labelled:
            name, wants_value, value = label.partition("=")
            if name in one.labels and (not wants_value or one.labels[name] == value):
                yield one.key, f"label {label}"
    for best in policy.keep_best:
        sign = 1.0 if best.mode == "min" else -1.0
        ranked = sorted(
            # Of equal values the later step is the better one.
            (sign * one.metrics[best.metric], -one.step, one.key)
            for one in facts
            if not math.isnan(one.metrics.get(best.metric, math.nan))
        )
        for _, _, key in ranked[: best.count]:
            yield key, f"best {best.count} by {best.metric} ({best.mode})"


def _keep_needed(
    needs: Mapping[StepKey, frozenset[StepKey]], reasons: dict[StepKey, list[str]]
) -> None:
    """Keep what kept steps refer to, and what that refers to."""
    waiting = [key for key, texts in reasons.items() if texts]
    while waiting:
        step, attempt = waiting.pop()
        for key in sorted(needs[step, attempt]):
            if key in reasons:
                if not reasons[key]:
                    waiting.append(key)
                reasons[key].append(f"holds bytes of step {step}.{attempt}")
