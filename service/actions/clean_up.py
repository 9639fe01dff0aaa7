"""Clean-up of a run: retention policies and garbage collection."""

from cairn.service.access.callers import Caller
from cairn.service.actions.job_start import JobStart
from cairn.service.actions.plane import ControlPlane
from cairn.service.jobs.kinds import gc, retention
from cairn.service.jobs.policies import stored_policy
from cairn.service.schemas import (
    ApplyRetentionRequest,
    Operation,
    RetentionDecision,
    RetentionPlan,
    RetentionPolicy,
)
from cairn.storage.runs import retention as stored_retention
from cairn.storage.store.clock import from_rfc3339, utc_now


def plan_retention(
    plane: ControlPlane, root: str, run: str, policy: RetentionPolicy
) -> RetentionPlan:
    """Return the steps that a policy would keep and delete now.

    Raises:
        RunNotFoundError: There is no such run.
        PolicyError: The policy is invalid, or names a metric or a label that no step has.
        UnsupportedFormatError, CorruptionError: A record of the run is unreadable.
    """
    stored_run = plane.run(root, run)
    decisions = []
    judged = stored_retention.plan_retention(stored_run, stored_policy(policy), now=utc_now())
    for info, decision in judged:
        assert info.created is not None  # a listed step has a manifest
        decisions.append(
            RetentionDecision(
                step=info.step,
                attempt=info.attempt,
                keep=decision.keep,
                reasons=list(decision.reasons),
                bytes=info.nbytes or 0,
                created=from_rfc3339(info.created),
            )
        )
    going = [decision for decision in decisions if not decision.keep]
    return RetentionPlan(
        root=root,
        run=stored_run.uri.name,
        decisions=decisions[::-1],
        delete_count=len(going),
        delete_bytes=sum(decision.bytes for decision in going),
    )


def apply_retention(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    body: ApplyRetentionRequest,
    *,
    idempotency_key: str | None,
) -> Operation:
    """Start to delete the steps that a policy does not keep.

    Raises:
        RunNotFoundError: There is no such run.
        PolicyError: The policy is invalid, or names a metric or a label that no step has.
        NotReadyError, IdempotencyKeyReusedError: See `JobStart`.
    """
    fields = {
        "root": root,
        "run": run,
        "policy": body.policy.model_dump(mode="json"),
        "grace_seconds": body.grace_seconds,
        "by": caller.name,
    }
    start = JobStart(plane, caller, root, retention.KIND, "run.retention", idempotency_key)
    if operation := start.earlier_operation(fields):
        return operation
    stored_run = plane.run(root, run)
    # Refuse now, not in the job.
    stored_retention.check_names(stored_run, stored_policy(body.policy))
    request = retention.retention_request(
        root=root, run=stored_run, policy=body.policy, grace=body.grace_seconds, by=caller.name
    )
    return start.submit(request)


def collect_garbage(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    *,
    dry_run: bool,
    idempotency_key: str | None,
) -> Operation:
    """Start to find a run's garbage and, without `dry_run`, to remove it for good.

    Raises:
        RunNotFoundError: There is no such run.
        NotReadyError, IdempotencyKeyReusedError: See `JobStart`.
    """
    start = JobStart(plane, caller, root, gc.KIND, "run.gc", idempotency_key)
    if operation := start.earlier_operation({"root": root, "run": run, "dry_run": dry_run}):
        return operation
    request = gc.gc_request(root=root, run=plane.run(root, run), dry_run=dry_run)
    return start.submit(request)
