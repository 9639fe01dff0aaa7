"""Retention policies of the API, and decisions about a run's steps by the rules of `storage`."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cairn.service.schemas import RetentionDecision, RetentionPlan, RetentionPolicy
from cairn.storage.runs import retention
from cairn.storage.runs.retention import BestSteps, Decision, plan_retention
from cairn.storage.runs.run import Run
from cairn.storage.runs.step_states import StepInfo
from cairn.storage.store.clock import from_rfc3339

Judged = tuple[StepInfo, Decision]


def stored_policy(policy: RetentionPolicy) -> retention.RetentionPolicy:
    """Convert a policy of the API to one of `storage`.

    Raises:
        PolicyError: The policy is invalid.
    """
    return retention.RetentionPolicy(
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
    """Format the rules of a policy, given as JSON, in one line."""
    numbers = ("keep_last", "keep_every", "keep_within_seconds")
    rules = [f"{name}={policy[name]:.15g}" for name in numbers if policy[name] is not None]
    rules += [
        f"keep_best={best['count']} by {best['metric']} ({best['mode']})"
        for best in policy["keep_best"]
    ]
    rules += [f"keep_labelled={label}" for label in policy["keep_labelled"]]
    return ", ".join(rules) or "no rule"


def judge(run: Run, policy: RetentionPolicy, *, now: datetime) -> list[Judged]:
    """Decide for every listed step whether a policy keeps it, lowest step first.

    Unreadable labels and metrics raise an error: a step that they would keep must not be deleted.

    Raises:
        PolicyError: The policy is invalid, or names a metric or a label that no step has.
        UnsupportedFormatError, CorruptionError: A manifest, an annotation or an alias is
            unreadable.
    """
    return plan_retention(run, stored_policy(policy), now=now)


def plan_body(root: str, run: Run, judged: list[Judged]) -> RetentionPlan:
    """Return decisions in the form of the API."""
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
