"""Verification of stored bytes and records, and repair of records."""

from collections.abc import Iterable
from dataclasses import asdict

from cairn.service.access.callers import Caller
from cairn.service.actions.audit import audited
from cairn.service.actions.job_start import JobStart
from cairn.service.actions.plane import ControlPlane
from cairn.service.jobs.kinds import verify
from cairn.service.schemas import Operation, Repair, RepairReport
from cairn.storage.runs.repair import repair_run


def verify_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    *,
    idempotency_key: str | None,
) -> Operation:
    """Start to read and verify every byte of a checkpoint.

    Raises:
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        NotReadyError, IdempotencyKeyReusedError: See `JobStart`.
    """
    start = JobStart(plane, caller, root, verify.KIND, "checkpoint.verify", idempotency_key)
    if operation := start.earlier_operation({"root": root, "run": run, "step": step}):
        return operation
    stored_run = plane.run(root, run)
    request = verify.verify_request(root=root, run=stored_run, step=stored_run.step(step))
    return start.submit(request)


def verify_run(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    *,
    steps: str,
    idempotency_key: str | None,
) -> Operation:
    """Start to verify a run's records, and the bytes of some of its listed steps.

    Args:
        plane: The control plane.
        caller: Caller of the request.
        root: Name of the run's root.
        run: Name of the run.
        steps: Listed steps to read: "all", "latest" or "none".
        idempotency_key: See `JobStart`.

    Raises:
        RunNotFoundError: There is no such run.
        NotReadyError, IdempotencyKeyReusedError: See `JobStart`.
    """
    start = JobStart(plane, caller, root, verify.KIND, "run.verify", idempotency_key)
    if operation := start.earlier_operation({"root": root, "run": run, "steps": steps}):
        return operation
    request = verify.verify_request(root=root, run=plane.run(root, run), step=None, steps=steps)
    return start.submit(request)


def repair_records(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    *,
    dry_run: bool,
    forget: Iterable[str],
) -> RepairReport:
    """Repair the records of a run or, with `dry_run`, return the possible repairs.

    Raises:
        RunNotFoundError: Nothing of a run is there.
        LeaseHeldError: A job writes the run.
        RecordNotLostError: A name in `forget` is not that of a lost record.
    """
    stored_run = plane.run_for_repair(root, run)
    names = list(forget)
    if dry_run:
        repairs = repair_run(stored_run, by=caller.name, dry_run=True, forget=names)
    else:
        with audited(plane, caller, "run.repair", root=root, run=run, forget=names) as entry:
            repairs = repair_run(stored_run, by=caller.name, dry_run=False, forget=names)
            entry.complete(
                repairs={repair.name: repair.action for repair in repairs if repair.done}
            )
        plane.index.refresh_runs({root: plane.root(root)}, [(root, run)])
    return RepairReport(
        root=root, run=run, repairs=[Repair(**asdict(repair)) for repair in repairs]
    )
