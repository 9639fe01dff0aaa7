"""Cleaning up a run: what a retention policy does not keep, and garbage."""

from cairn.service.access import Caller
from cairn.service.actions.plane import ControlPlane
from cairn.service.actions.starting import Start
from cairn.service.jobs import gc, judge, plan_body, retention, stored_policy
from cairn.service.schemas import ApplyRetentionRequest, Operation, RetentionPlan, RetentionPolicy
from cairn.storage.runs import check_names
from cairn.storage.store import utc_now


def plan_retention(
    plane: ControlPlane, root: str, run: str, policy: RetentionPolicy
) -> RetentionPlan:
    """What a policy keeps and deletes of a run now.

    Raises:
        RunNotFoundError: There is no such run.
        PolicyError: The policy can't act, or names a metric or a label that no step carries.
        UnsupportedFormatError, CorruptionError: A record of the run can't be read.
    """
    found = plane.run(root, run)
    return plan_body(root, found, judge(found, policy, now=utc_now()))


def apply_retention(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    wanted: ApplyRetentionRequest,
    *,
    idempotency_key: str | None,
) -> Operation:
    """Start to delete what a policy does not keep.

    Raises:
        RunNotFoundError: There is no such run.
        PolicyError: The policy can't act, or names a metric or a label that no step carries.
        NotReadyError, IdempotencyKeyReusedError: As `Start`.
    """
    asked = {
        "root": root,
        "run": run,
        "policy": wanted.policy.model_dump(mode="json"),
        "grace_seconds": wanted.grace_seconds,
        "by": caller.name,
    }
    start = Start(plane, caller, root, retention.KIND, "run.retention", idempotency_key)
    if known := start.repeated(asked):
        return known
    found = plane.run(root, run)
    check_names(found, stored_policy(wanted.policy))  # refused now rather than by the job
    request = retention.retention_request(
        root=root, run=found, policy=wanted.policy, grace=wanted.grace_seconds, by=caller.name
    )
    return start.make(request)


def collect_garbage(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    *,
    dry_run: bool,
    idempotency_key: str | None,
) -> Operation:
    """Start to find what the run needs no more, and without `dry_run` to remove it for good.

    Raises:
        RunNotFoundError: There is no such run.
        NotReadyError, IdempotencyKeyReusedError: As `Start`.
    """
    start = Start(plane, caller, root, gc.KIND, "run.gc", idempotency_key)
    if known := start.repeated({"root": root, "run": run, "dry_run": dry_run}):
        return known
    request = gc.gc_request(root=root, run=plane.run(root, run), dry_run=dry_run)
    return start.make(request)
