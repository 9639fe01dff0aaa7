"""Retention: the decision which steps of a run to keep, and its execution.

`evaluate_retention` decides from the facts that it gets, without I/O. `apply_retention` reads the
facts, and deletes steps through the trash.

A step is kept if a rule of the policy keeps it. Kept under any policy are the latest step, a step
that an alias names, a step in use, and every step whose bytes a kept step needs. A policy never
deletes a step whose damage is noted, and its rules never choose such a step: they choose among the
sound steps, and the latest step is the latest sound one.

A policy without rules deletes nothing. Neither does a policy with a metric or a label that no step
has: a misspelt name would delete the steps that it should keep.
"""

import contextlib
import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, ClassVar, Final, Literal

from cairn.storage.errors import (
    CorruptionError,
    PolicyError,
    RunNotFoundError,
    StepInUseError,
    StorageError,
)
from cairn.storage.runs.damage import damaged_steps, doubtful_steps
from cairn.storage.runs.history import saved_among
from cairn.storage.runs.records.annotations import Annotation, Better
from cairn.storage.runs.records.attempts import Attempt
from cairn.storage.runs.records.layout import annotation_file, trash_file
from cairn.storage.runs.records.placed import read_record, read_records
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo, StepState
from cairn.storage.runs.trash import (
    GRACE_SECONDS,
    RunUse,
    StepKey,
    Tombstone,
    declare,
    lay_tombstone,
    lift,
    read_tombstones,
    withdraw,
)
from cairn.storage.store.clock import Clock, from_rfc3339, is_above_zero, rfc3339, utc_now
from cairn.storage.store.records import canonical_json

__all__ = [
    "BestSteps",
    "Decision",
    "PolicyJudge",
    "RetentionOutcome",
    "RetentionPolicy",
    "StepFacts",
    "apply_retention",
    "check_names",
    "evaluate_retention",
    "plan_retention",
    "ranked",
    "step_facts",
]

_STEPS_AT_ONCE: Final = 8
_NAMES_SHOWN: Final = 5
_ALIKE: Final = 0.6
_MISSPELT: Final = 0.8  # 1 is the same name; "train/loss" and "eval/loss" are 0.63 alike
_WITHOUT_DIGITS: Final = str.maketrans("", "", "0123456789")


@dataclass(frozen=True, kw_only=True)
class BestSteps:
    """Rule that keeps the best steps by one metric.

    Attributes:
        metric: name of the metric; steps without it, or with NaN, are never among the best.
        count: number of steps to keep.
        mode: "min" if lower is better, such as for a loss; else "max".
    """

    metric: str
    count: int = 1
    mode: Literal["min", "max"] = "min"


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Steps of a run to keep. Rules add up: a step that one rule keeps is not deleted by another.

    Attributes:
        keep_last: the number of latest steps to keep.
        keep_every: keep every step whose number is a multiple of this.
        keep_within: keep every step saved within this many seconds before now.
        keep_best: keep the best steps by some metrics.
        keep_labelled: keep every step with one of these labels: a name for any value, "name=value"
            for that value.

    Raises:
        PolicyError: a number is below 1 or not a number, a text is passed for a list, a name is
            empty, or a mode does not exist; all problems are listed.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: float | None = None
    keep_best: Sequence[BestSteps] = ()
    keep_labelled: Sequence[str] = ()

    def __post_init__(self) -> None:
        problems = [
            *_not_lists("keep_best", self.keep_best, "BestSteps"),
            *_not_lists("keep_labelled", self.keep_labelled, "labels"),
        ]
        best_steps: tuple[Any, ...] = () if problems else tuple(self.keep_best)
        labels: tuple[Any, ...] = () if problems else tuple(self.keep_labelled)
        problems += [
            f"keep_best has {best!r}, expected a BestSteps"
            for best in best_steps
            if not isinstance(best, BestSteps)
        ]
        bests: list[Any] = [best for best in best_steps if isinstance(best, BestSteps)]
        problems += [
            f"{name} is {value!r}, expected an integer of 1 or more"
            for name, value in [
                ("keep_last", self.keep_last),
                ("keep_every", self.keep_every),
                *((f"keep_best[{best.metric!r}].count", best.count) for best in bests),
            ]
            if value is not None and (type(value) is not int or value < 1)
        ]
        within = self.keep_within
        if within is not None and not is_above_zero(within):
            problems.append(f"keep_within is {within!r}, expected seconds above 0")
        for best in bests:
            if not isinstance(best.metric, str) or not best.metric:
                problems.append(f"keep_best has a metric without a name: {best.metric!r}")
            if best.mode not in ("min", "max"):
                problems.append(f"keep_best mode is {best.mode!r}, expected 'min' or 'max'")
        for label in labels:
            if not isinstance(label, str):
                problems.append(f"keep_labelled has {label!r}, expected text")
            elif not label.partition("=")[0]:
                problems.append(f"keep_labelled has a label without a name: {label!r}")
        if problems:
            raise PolicyError(
                "the retention policy can't act",
                expected="rules that can act",
                found="; ".join(problems),
                next_step="Correct these, or leave them out.",
            )
        object.__setattr__(self, "keep_best", best_steps)
        object.__setattr__(self, "keep_labelled", labels)

    def to_json(self) -> dict[str, Any]:
        """Return the policy as JSON, which `from_json` reads."""
        rules = asdict(self)
        rules["keep_best"] = [asdict(best) for best in self.keep_best]
        return {name: rule for name, rule in rules.items() if rule not in (None, (), [])}

    @classmethod
    def from_json(cls, rules: Mapping[str, Any]) -> "RetentionPolicy":
        """Return the policy whose `to_json` returned `rules`.

        Raises:
            PolicyError: this release does not know, or can't apply, some rules.
        """
        try:
            best = [BestSteps(**entry) for entry in rules.get("keep_best", ())]
            return cls(**{**rules, "keep_best": best})
        except TypeError as exc:
            raise PolicyError(
                "an unknown retention policy",
                expected=f"the rules {', '.join(rule.name for rule in fields(cls))}",
                found=str(exc),
                next_step="Upgrade Cairn to the release that wrote it, or a later one.",
            ) from exc

    @property
    def deletes(self) -> bool:
        """True if there is any rule; a policy without rules keeps everything."""
        numbers = (self.keep_last, self.keep_every, self.keep_within)
        return self.has_names or any(number is not None for number in numbers)

    @property
    def has_names(self) -> bool:
        """True if the policy names metrics or labels."""
        return bool(self.keep_best or self.keep_labelled)


def _not_lists(name: str, rule: object, of: str) -> list[str]:
    """Return a problem if a rule is not a list, such as a text, whose letters would be entries."""
    if isinstance(rule, Iterable) and not isinstance(rule, str | bytes | Mapping):
        return []
    return [f"{name} is {rule!r}, expected a list of {of}"]


@dataclass(frozen=True)
class StepFacts:
    """Facts about a listed step that a decision needs.

    Attributes:
        step: step number.
        attempt: the attempt that holds it.
        created: time of the save.
        metrics: numbers by name.
        labels: texts by name.
        needs: the other steps whose bytes it needs.
        better: direction of metrics, from the step's annotation.
        damaged: whether its last verification failed.
    """

    step: int
    attempt: int
    created: datetime
    metrics: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    needs: frozenset[StepKey] = frozenset()
    better: Mapping[str, Better] = field(default_factory=dict)
    damaged: bool = False

    @property
    def key(self) -> StepKey:
        """Key of the step: (step, attempt)."""
        return self.step, self.attempt


@dataclass(frozen=True)
class Decision:
    """Decision about one step, with the reasons.

    Attributes:
        step: step number.
        attempt: the attempt that holds it.
        reasons: reasons to keep it; empty if it may be deleted.
    """

    step: int
    attempt: int
    reasons: tuple[str, ...]

    @property
    def keep(self) -> bool:
        """True if the step stays."""
        return bool(self.reasons)


def evaluate_retention(
    steps: Iterable[StepFacts],
    policy: RetentionPolicy,
    *,
    now: datetime,
    aliases: Mapping[str, StepKey],
    in_use: Collection[StepKey] = (),
) -> list[Decision]:
    """Return a decision for each step: whether it stays, and why.

    All steps stay if no step has some metric or label of the policy.

    Args:
        steps: every listed step, in any order.
        policy: the steps to keep.
        now: the present time.
        aliases: alias -> (step, attempt) that it names.
        in_use: steps in use now, as (step, attempt).

    Returns:
        One decision per step, by step.

    Raises:
        PolicyError: an entry of `in_use` is not (step, attempt), so that it would protect nothing.
    """
    _check_in_use(in_use)
    facts = sorted(steps, key=lambda step: step.key)
    reasons: dict[StepKey, list[str]] = {step.key: [] for step in facts}

    def keep(keys: Iterable[StepKey], reason: str) -> None:
        for key in keys:
            if key in reasons:
                reasons[key].append(reason)

    sound = [step for step in facts if not step.damaged]
    keep([step.key for step in sound[-1:]], "latest")
    keep([step.key for step in facts if step.damaged], "damaged")
    for alias, key in sorted(aliases.items()):
        keep([key], f"alias {alias}")
    keep(sorted(set(in_use)), "in use")
    for key, reason in _by_rules(sound, policy, now):
        keep([key], reason)
    if not policy.deletes:
        keep(list(reasons), "no rule deletes")
    # A misspelt name would delete the steps that it should keep.
    for unmet in _unmet(facts, policy):
        keep(list(reasons), unmet.short)
    _keep_needed({step.key: step.needs for step in facts}, reasons)
    return [Decision(*key, tuple(texts)) for key, texts in reasons.items()]


def _check_in_use(in_use: Any) -> None:
    odd = [in_use]
    if isinstance(in_use, Collection):
        # Only ints: `isinstance(True, int)` holds too.
        odd = [
            key
            for key in in_use
            if not (isinstance(key, tuple) and [*map(type, key)] == [int, int])
        ]
    if odd:
        raise PolicyError(
            "not a collection of steps",
            path="in_use",
            expected="pairs (step, attempt) of whole numbers",
            found=", ".join(map(repr, odd)),
            next_step="Take the attempt of each from Run.step(), or from Run.step_attempts().",
        )


def _by_rules(
    facts: Sequence[StepFacts], policy: RetentionPolicy, now: datetime
) -> Iterable[tuple[StepKey, str]]:
    if policy.keep_last is not None:
        for step in facts[-policy.keep_last :]:
            yield step.key, f"last {policy.keep_last}"
    for step in facts:
        if policy.keep_every is not None and step.step % policy.keep_every == 0:
            yield step.key, f"every {policy.keep_every}"
        within = policy.keep_within
        if within is not None and step.created >= now - timedelta(seconds=within):
            yield step.key, f"within {within:g} s"
        for label in policy.keep_labelled:
            if _has_label(step, label):
                yield step.key, f"label {label}"
    for best in policy.keep_best:
        for key in ranked(facts, best.metric, best.mode)[: best.count]:
            yield key, f"best {best.count} by {best.metric} ({best.mode})"


def ranked(facts: Iterable[StepFacts], metric: str, mode: Literal["min", "max"]) -> list[StepKey]:
    """Return the steps that have a value of a metric, best first; of equal ones the later first."""
    sign = 1.0 if mode == "min" else -1.0
    values = sorted(
        (sign * step.metrics[metric], -step.step, step.key)
        for step in facts
        if _has_metric(step, metric)
    )
    return [key for _, _, key in values]


def _has_metric(step: StepFacts, metric: str) -> bool:
    return not math.isnan(step.metrics.get(metric, math.nan))


def _has_label(step: StepFacts, label: str) -> bool:
    name, wants_value, value = label.partition("=")
    return name in step.labels and (not wants_value or step.labels[name] == value)


@dataclass(frozen=True)
class _Unmet:
    """Metric or label of a policy that no step has.

    Attributes:
        kind: "metric" or "label".
        name: name of it in the policy.
        known: names of that kind that steps have.
    """

    kind: Literal["metric", "label"]
    name: str
    known: Collection[str]

    @property
    def short(self) -> str:
        """The problem in a few words."""
        return f"no step carries the {self.kind} {self.name!r}"

    @property
    def problem(self) -> str:
        """The problem in one line, with the name that was probably meant."""
        nearest = self.nearest(_ALIKE)
        if self.name in self.known:
            hint = "it is NaN wherever there is one"
        elif nearest is not None:
            hint = f"the nearest known is {nearest!r}"
        elif self.known:
            shown = sorted(self.known)[:_NAMES_SHOWN]
            more = f" and {len(self.known) - len(shown)} more" * (len(self.known) > len(shown))
            hint = f"known are {', '.join(map(repr, shown))}{more}"
        else:
            hint = f"no step has any {self.kind}"
        return f"{self.short}: {hint}"

    @property
    def is_wrong_for_good(self) -> bool:
        """True if the name is a misspelt known one; names that differ in digits are two names."""
        if self.name in self.known or (self.kind == "label" and "=" in self.name):
            return False  # a later step may have a number, or another value of the label
        meant = self.nearest(_MISSPELT)
        return meant is not None and _letters(meant) != _letters(self.name)

    def nearest(self, likeness: float) -> str | None:
        """Return the most similar known name; None if none is at least that similar (0 to 1)."""
        names = {name.casefold(): name for name in sorted(self.known) if name != self.name}
        matches = difflib.get_close_matches(self.name.casefold(), names, n=1, cutoff=likeness)
        return names[matches[0]] if matches else None


@dataclass(frozen=True)
class _Contradicted:
    """Metric for which a policy has another direction than the steps' annotations.

    Attributes:
        best: the rule.
        noted: the directions in the annotations.
    """

    best: BestSteps
    noted: Collection[Better]
    is_wrong_for_good: ClassVar[bool] = True

    @property
    def short(self) -> str:
        """The problem in a few words."""
        return f"of the metric {self.best.metric!r} steps say that {self._said} is better"

    @property
    def problem(self) -> str:
        """The problem in one line, with the policy's direction."""
        return f"{self.short}, and the policy has {self.best.mode!r}"

    @property
    def _said(self) -> str:
        return " and ".join(repr(direction) for direction in sorted(self.noted))


def metric_directions(facts: Iterable[StepFacts], metric: str) -> set[Better]:
    """Return the directions that the steps' annotations have for a metric; there may be two."""
    return {step.better[metric] for step in facts if metric in step.better}


def _letters(name: str) -> str:
    return name.translate(_WITHOUT_DIGITS)


def _unmet(facts: Collection[StepFacts], policy: RetentionPolicy) -> list[_Unmet | _Contradicted]:
    """Return the policy's names that no step has, and directions that annotations contradict.

    The result is empty if there are no steps.
    """
    if not facts:
        return []
    metrics = {name for step in facts for name in step.metrics}
    unmet: list[_Unmet | _Contradicted] = [
        _Contradicted(best, noted)
        for best in policy.keep_best
        if (noted := metric_directions(facts, best.metric)) - {best.mode}
    ]
    unmet += [
        _Unmet("metric", best.metric, metrics)
        for best in policy.keep_best
        if not any(_has_metric(step, best.metric) for step in facts)
    ]
    names = {name for step in facts for name in step.labels}
    for label in policy.keep_labelled:
        if any(_has_label(step, label) for step in facts):
            continue
        name, _, _ = label.partition("=")
        values = {f"{name}={step.labels[name]}" for step in facts if name in step.labels}
        unmet.append(_Unmet("label", label, values) if values else _Unmet("label", name, names))
    return unmet


def _refuse(run: Run, unmet: Collection[_Unmet | _Contradicted]) -> None:
    if unmet:
        raise PolicyError(
            "the policy does not fit the steps of the run",
            path=run.uri,
            expected="metrics and labels of the run's steps, as they have them",
            found=f"{len(unmet)} that none has so, and nothing is deleted",
            next_step="Correct these, leave their rules out, or wait until a step has them.",
            problems=[entry.problem for entry in unmet],
        )


def _keep_needed(
    needs: Mapping[StepKey, frozenset[StepKey]], reasons: dict[StepKey, list[str]]
) -> None:
    """Add reasons for all steps whose bytes kept steps need, directly or through other steps."""
    waiting = [key for key, texts in reasons.items() if texts]
    while waiting:
        step, attempt = waiting.pop()
        for key in sorted(needs[step, attempt]):
            if key in reasons:
                if not reasons[key]:
                    waiting.append(key)
                reasons[key].append(f"holds bytes of step {step}.{attempt}")


@dataclass(frozen=True)
class RetentionOutcome:
    """Result of a retention pass.

    Attributes:
        decisions: one for each listed step, as decided last.
        deleted: the steps that are now in the trash, as (step, attempt).
        in_use: steps that came into use before they could be deleted -> their users.
        errors: failures. A step that should be deleted and is not in `deleted` still exists, unless
            its error says that this is unknown. The error of a deleted step says that a power
            failure may undo the deletion.
    """

    decisions: tuple[Decision, ...]
    deleted: tuple[StepKey, ...] = ()
    in_use: Mapping[StepKey, str] = field(default_factory=dict)
    errors: tuple[StorageError, ...] = ()


def step_facts(run: Run, steps: Iterable[StepInfo] | None = None) -> list[StepFacts]:
    """Return the facts about steps of a run that a decision needs.

    Args:
        run: the run.
        steps: the steps; by default every listed one.

    Raises:
        UnsupportedFormatError, CorruptionError: a manifest or an annotation can't be read, which
            may contain a reason to keep its step.
    """
    steps = list(run.steps() if steps is None else steps)
    damaged = [info for info in steps if info.problem is not None]
    if damaged:
        raise CorruptionError(
            "not every step can be judged",
            path=run.uri,
            expected="manifests as they were written",
            found=f"{len(damaged)} that are not",
            next_step="See what `cairn repair` can do, restore them from a backup, or delete "
            "these steps.",
            problems=[f"{info.problem}" for info in damaged],
        )
    names = {annotation_file(info.step, info.attempt): info for info in steps}
    annotations = read_records(run.objects, names, Annotation.parse)
    facts = []
    for name, info in names.items():
        notes = annotations.get(name) or Annotation()
        created = from_rfc3339(info.created or "")
        facts.append(
            StepFacts(
                info.step,
                info.attempt,
                created,
                notes.metrics,
                notes.labels,
                better=notes.better,
                damaged=notes.damaged is not None,
            )
        )
    return facts


def plan_retention(
    run: Run,
    policy: RetentionPolicy,
    *,
    now: datetime,
    in_use: Collection[StepKey] = (),
    undeleted: Collection[StepKey] = (),
) -> list[tuple[StepInfo, Decision]]:
    """Return the decision about each listed step, lowest first; delete nothing.

    Args:
        run: the run.
        policy: the steps to keep.
        now: the present time.
        in_use: steps in use now, as (step, attempt).
        undeleted: deleted steps to treat as not deleted.

    Raises:
        PolicyError: no step has a metric or a label of the policy, or an entry of `in_use` is not
            (step, attempt).
        UnsupportedFormatError, CorruptionError: a manifest, an annotation, an alias or a record
            that decides about steps can't be read or is lost, and may contain a reason to keep a
            step.
    """
    facts, judged = _judged(run, policy, now=now, in_use=in_use, undeleted=undeleted)
    _refuse(run, _unmet(facts, policy))
    return judged


def _judged(
    run: Run,
    policy: RetentionPolicy,
    *,
    now: datetime,
    in_use: Collection[StepKey] = (),
    undeleted: Collection[StepKey] = (),
) -> tuple[list[StepFacts], list[tuple[StepInfo, Decision]]]:
    """Return the facts, and the decisions of `plan_retention`.

    Instead of raising PolicyError, it keeps all steps if no step has some metric or label of the
    policy.
    """
    history = run.history()
    history.require_whole()
    keys = history.listed(undeleted=undeleted).items()
    infos = {
        (info.step, info.attempt): info
        for info in run.described([(key, StepState.LISTED) for key in keys])
    }
    facts = step_facts(run, infos.values())
    # Aliases after facts: an alias that moves meanwhile is read here, or after the tombstones
    # are written.
    aliases = {alias.alias: (alias.step, alias.attempt) for alias in run.aliases.list()}
    decisions = evaluate_retention(facts, policy, now=now, aliases=aliases, in_use=in_use)
    return facts, [(infos[decision.step, decision.attempt], decision) for decision in decisions]


def check_names(
    run: Run,
    policy: RetentionPolicy,
    *,
    for_later: bool = False,
    facts: Collection[StepFacts] | None = None,
) -> None:
    """Raise PolicyError if a policy has metrics or labels that no step has; delete nothing.

    Args:
        run: the run; if it does not exist yet, any policy is accepted.
        policy: the steps to keep.
        for_later: whether the policy is for future steps, which may have new names; then only
            misspelt names are refused.
        facts: facts about the run's steps; None reads them.

    Raises:
        PolicyError: the policy has such names, or another direction for a metric than the steps
            record; all are listed.
        UnsupportedFormatError, CorruptionError: the facts about steps can't be read.
    """
    if not policy.has_names:
        return
    with contextlib.suppress(RunNotFoundError):
        facts = step_facts(Run.open(run.uri)) if facts is None else facts
        unmet = _unmet(facts, policy)
        _refuse(run, [entry for entry in unmet if entry.is_wrong_for_good or not for_later])


def apply_retention(
    run: Run,
    policy: RetentionPolicy,
    *,
    by: str,
    reason: str = "retention policy",
    in_use: Collection[StepKey] = (),
    grace: float = GRACE_SECONDS,
    progress: Callable[[Sequence[StepInfo], int], None] | None = None,
    clock: Clock = utc_now,
) -> RetentionOutcome:
    """Delete the listed steps that a policy does not keep; each can be undeleted for a while.

    If the run is rolled back meanwhile, or a kept step turns out damaged, the deleted steps are
    judged again, so that at the end no step is deleted that the policy keeps.

    Args:
        run: the run.
        policy: the steps to keep.
        by: the caller's name.
        reason: reason of the deletions, for the tombstones.
        in_use: steps in use now, as (step, attempt).
        grace: seconds during which a deleted step can be undeleted.
        progress: called before each batch of deletions and at the end, with (steps finished since
            the last call, bytes to delete in all). If it raises, the pass ends; finished deletions
            remain.
        clock: returns the current time in UTC.

    Raises:
        PolicyError: no step has a metric or a label of the policy, or an entry of `in_use` is not
            (step, attempt); nothing was deleted.
        StorageError: the facts could not be read; earlier deletions of this call remain valid.
    """
    deletion = _Pass(run, policy, by, reason, in_use, grace, clock)
    _refuse(run, _unmet(deletion.judge(), policy))
    while batch := deletion.next_batch():
        deletion.report(progress)
        deletion.delete(batch)
    deletion.look_at_judged()
    deletion.report(progress)
    return deletion.outcome()


class _Pass:
    """Retention pass that is running."""

    def __init__(
        self,
        run: Run,
        policy: RetentionPolicy,
        by: str,
        reason: str,
        in_use: Collection[StepKey],
        grace: float,
        clock: Clock,
    ) -> None:
        self._run = run
        self._policy = policy
        self._by = by
        self._reason = reason
        self._protected = in_use
        self._grace = grace
        self._clock = clock
        self._judged: list[tuple[StepInfo, Decision]] = []
        self._attempts: list[Attempt] = []
        self._laid: dict[StepKey, bytes] = {}
        self._in_use: dict[StepKey, str] = {}
        self._errors: dict[StepKey, StorageError] = {}
        self._done: list[StepInfo] = []

    def judge(self) -> list[StepFacts]:
        """Apply the policy to the present history, as if this pass had deleted nothing.

        Returns:
            The facts about the steps.
        """
        self._attempts = self._run.attempts()  # read first: `_changed` sees later ones
        facts, self._judged = _judged(
            self._run, self._policy, now=self._clock(), in_use=self._protected, undeleted=self._laid
        )
        return facts

    def next_batch(self) -> list[StepInfo]:
        """Return the steps to delete next; empty once all are done."""
        seen = self._laid.keys() | self._in_use.keys() | self._errors.keys()
        going = (info for info, decision in self._judged if not decision.keep)
        left = [info for info in going if (info.step, info.attempt) not in seen]
        return left[:_STEPS_AT_ONCE]

    def delete(self, batch: Sequence[StepInfo]) -> None:
        """Delete a batch of steps, except those in use, damaged, or kept after the last judgement.

        For each step the intent is written before the uses are read, and the tombstone after.
        """
        intents: dict[StepKey, bytes | None] = {}

        def declare_intent(key: StepKey) -> None:
            now = self._clock()
            intents[key] = declare(self._run, key, by=self._by, reason=self._reason, now=now)

        try:
            for info in batch:
                self._trying(info, declare_intent)
            # After the intents: a process that begins to need a step from now on sees its intent.
            use = RunUse.of(self._run, self._clock())
            # Damage noted since the judgement; `look_at_judged` sees what is noted later.
            damaged = doubtful_steps(self._run, intents)
            if self._changed(use.attempts):
                self.judge()
            kept = self._kept()
            tombstone = self._tombstone()
            for info in batch:
                key = info.step, info.attempt
                uses = [*use.of_step(info), *kept.get(key, ())] + ["damaged"] * (key in damaged)
                if uses:
                    self._in_use.setdefault(key, ", ".join(uses))
                elif key in intents:
                    self._trying(info, lambda key: self._lay(key, tombstone))
            self._look_back(kept)
        finally:
            for key, intent in intents.items():
                withdraw(self._run, key, intent)
        self._done += batch

    def _trying(self, info: StepInfo, do: Callable[[StepKey], None]) -> None:
        """Call `do` for one step. Record a StorageError; the other steps are still deleted."""
        key = info.step, info.attempt
        try:
            do(key)
        except StepInUseError as exc:
            self._in_use[key] = str(exc)
        except StorageError as exc:
            self._errors[key] = exc

    def _tombstone(self) -> Tombstone:
        now = self._clock()
        return Tombstone(
            at=rfc3339(now),
            expires=rfc3339(now + timedelta(seconds=self._grace)),
            by=self._by,
            reason=self._reason,
            policy=self._policy.to_json(),
            judged=self._attempts[-1].number if self._attempts else 0,
        )

    def _lay(self, key: StepKey, tombstone: Tombstone) -> None:
        try:
            laid = lay_tombstone(self._run, key, tombstone)
        except StorageError:
            # The answer may have been lost after the write: if the tombstone is there, it is this
            # pass's.
            with contextlib.suppress(StorageError):
                stored = read_record(self._run.objects, trash_file(*key), Tombstone)
                if stored is not None and stored[0] == tombstone:
                    self._laid[key] = stored[1]
            raise
        if isinstance(laid, bytes):
            self._laid[key] = laid
        else:
            self._in_use[key] = "somebody else has deleted it"

    def _kept(self) -> dict[StepKey, tuple[str, ...]]:
        """Return the reasons of each kept step."""
        return {
            (decision.step, decision.attempt): decision.reasons
            for _, decision in self._judged
            if decision.keep
        }

    def _look_back(self, kept: Mapping[StepKey, tuple[str, ...]]) -> None:
        """Withdraw tombstones of steps that the policy keeps now, or that came into use.

        A use is noticed this late only if this process paused for longer than an intent lasts.
        """
        use = RunUse.of(self._run, self._clock())
        if self._changed(use.attempts):
            self.judge()
            kept = self._kept()
        self._lift(use, kept)

    def look_at_judged(self) -> None:
        """Withdraw tombstones of steps found damaged since, or kept instead of a damaged one."""
        sound = [key for key, reasons in self._kept().items() if "damaged" not in reasons]
        if self._laid and damaged_steps(self._run, [*sound, *self._laid]):
            self.judge()
            self._lift(RunUse.of(self._run, self._clock()), self._kept())

    def _lift(self, use: RunUse, kept: Mapping[StepKey, tuple[str, ...]]) -> None:
        for key in list(self._laid):
            uses = [*use.of_step(StepInfo(*key, StepState.LISTED)), *kept.get(key, ())]
            if uses:
                lift(self._run, key, self._laid.pop(key))
                self._in_use[key] = ", ".join(uses)

    def _changed(self, attempts: list[Attempt]) -> bool:
        """Return True if the history has changed since it was judged."""
        if attempts != self._attempts:
            return True
        listed = self._run.step_attempts()
        kept = (info for info, decision in self._judged if decision.keep)
        return any(listed.get(info.step) != info.attempt for info in kept)

    def report(self, progress: Callable[[Sequence[StepInfo], int], None] | None) -> None:
        """Call `progress` with the steps finished since the last report."""
        done, self._done = self._done, []
        if progress is not None:
            going = [info for info, decision in self._judged if not decision.keep]
            progress(done, sum(info.nbytes or 0 for info in going))

    def outcome(self) -> RetentionOutcome:
        return RetentionOutcome(
            tuple(decision for _, decision in self._judged),
            tuple(sorted(self._laid)),
            self._in_use,
            tuple(self._errors.values()),
        )


class PolicyJudge:
    """Second judgement of tombstones by the policies that wrote them, on the present history.

    All steps that policies have deleted and that still exist are treated as not deleted. An
    instance serves one collection of garbage: it reads the run again only if another
    attempt has begun, or the newest has published the step that it was begun to overwrite.
    """

    def __init__(self, run: Run, *, clock: Clock = utc_now) -> None:
        self._run = run
        self._clock = clock
        self._kept: dict[tuple[bytes, int, bool], set[StepKey]] = {}

    def keeps(self, key: StepKey, tombstone: Tombstone) -> bool:
        """Return True if the policy that wrote the tombstone of the step `key` keeps the step now.

        Return False for a tombstone that no policy wrote. The policy is applied only if an attempt
        has begun since, or the newest attempt was begun to overwrite a step: otherwise no step can
        have been superseded.

        Raises:
            PolicyError: a later release wrote the policy.
            UnsupportedFormatError, CorruptionError: a record that the policy needs can't be read.
        """
        if tombstone.policy is None:
            return False
        newest = next(reversed(self._run.attempts()), None)
        number, overwrites = (0, None) if newest is None else (newest.number, newest.overwrites)
        if number == tombstone.judged and overwrites is None:
            return False
        replaced = [] if overwrites is None else [(overwrites, number)]
        has_overwritten = bool(saved_among(self._run.objects, replaced))
        cache_key = canonical_json(tombstone.policy), number, has_overwritten
        if cache_key not in self._kept:
            self._kept[cache_key] = self._judged(RetentionPolicy.from_json(tombstone.policy))
        return key in self._kept[cache_key]

    def _judged(self, policy: RetentionPolicy) -> set[StepKey]:
        undeleted = [
            key
            for key, tombstone in read_tombstones(self._run.objects).items()
            if tombstone.policy is not None and not tombstone.removing
        ]
        _, judged = _judged(self._run, policy, now=self._clock(), undeleted=undeleted)
        return {(decision.step, decision.attempt) for _, decision in judged if decision.keep}
