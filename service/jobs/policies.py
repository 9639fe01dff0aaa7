"""Retention policies of the API: in the form of `storage`, and as text."""

from collections.abc import Mapping
from typing import Any

from cairn.service.schemas import RetentionPolicy
from cairn.storage.runs import retention
from cairn.storage.runs.retention import BestSteps


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
