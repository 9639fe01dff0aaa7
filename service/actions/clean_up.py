"""Clean-up of a run: retention policies and garbage collection."""

from cairn.service.access.callers import Caller
from cairn.service.actions.job_start import JobStart
from cairn.service.actions.plane import ControlPlane
from cairn.service.jobs.kinds import gc, retention
from cairn.service.jobs.policies import judge, plan_body, stored_policy
from cairn.service.schemas import ApplyRetentionRequest, Operation, RetentionPlan, RetentionPolicy
from cairn.storage.runs.retention import check_names
from cairn.storage.store.clock import utc_now


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
    return plan_body(root, stored_run, judge(stored_run, policy, now=utc_now()))


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
    check_names(stored_run, stored_policy(body.policy))  # refuse now, not in the job
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
