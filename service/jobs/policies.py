"""What a retention policy means for a run now: read from the store, decided by `storage`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cairn.service.schemas import RetentionDecision, RetentionPlan, RetentionPolicy
from cairn.storage import runs
from cairn.storage.runs import BestSteps, Decision, Run, StepInfo, judge_retention
from cairn.storage.store import from_rfc3339

Judged = tuple[StepInfo, Decision]


def stored_policy(policy: RetentionPolicy) -> runs.RetentionPolicy:
    """A policy of the API as `storage` takes it.

    Raises:
        PolicyError: It can't act.
    """
    return runs.RetentionPolicy(
        keep_last=policy.keep_last,
        keep_every=policy.keep_every,
        keep_within=policy.keep_within_seconds,
        keep_best=[
            BestSteps(metric=best.metric, count=best.count, mode=best.mode)
            for best in policy.keep_best
        ],
        keep_labelled=policy.keep_labelled,
    )


def policy_text(policy: Mapping[str, Any]) -> str:
    """The rules of a policy, given as JSON, in one line."""
    numbers = ("keep_last", "keep_every", "keep_within_seconds")
    rules = [f"{name}={policy[name]:.15g}" for name in numbers if policy[name] is not None]
    rules += [
        f"keep_best={best['count']} by {best['metric']} ({best['mode']})"
        for best in policy["keep_best"]
    ]
    rules += [f"keep_labelled={label}" for label in policy["keep_labelled"]]
    return ", ".join(rules) or "no rule"


def judge(run: Run, policy: RetentionPolicy, *, now: datetime) -> list[Judged]:
    """Decide for every listed step, lowest first.

    Labels and metrics that can't be read are an error here, not a silence: what they would have
    kept must not go.

    Raises:
        PolicyError: The policy can't act, or names a metric or a label that no step carries.
        UnsupportedFormatError, CorruptionError: A manifest, an annotation or an alias can't be
            read.
    """
    return judge_retention(run, stored_policy(policy), now=now)


def plan_body(root: str, run: Run, judged: list[Judged]) -> RetentionPlan:
    """Decisions as the API gives them out."""
    going = [info for info, decision in judged if not decision.keep]
    return RetentionPlan(
        root=root,
        run=run.uri.name,
        decisions=[
            RetentionDecision(
                step=info.step,
                attempt=info.attempt,
                keep=decision.keep,
                reasons=list(decision.reasons),
                bytes=info.nbytes or 0,
                created=_created(info),
            )
            for info, decision in reversed(judged)
        ],
        delete_count=len(going),
        delete_bytes=sum(info.nbytes or 0 for info in going),
    )


def _created(info: StepInfo) -> datetime:
    assert info.created is not None  # a listed step has a manifest
    return from_rfc3339(info.created)
