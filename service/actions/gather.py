"""Gathering of a checkpoint into one safetensors file."""

from cairn.service.access.callers import Caller
from cairn.service.actions.job_start import JobStart
from cairn.service.actions.plane import ControlPlane
from cairn.service.jobs.kinds import gather
from cairn.service.jobs.kinds.export_job import export_request
from cairn.service.schemas import GatherRequest, Operation
from cairn.storage.runs.damage import refuse_damaged


def gather_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    body: GatherRequest,
    *,
    idempotency_key: str | None,
) -> Operation:
    """Start to gather items of any checkpoint into one file.

    Raises:
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        StepDamagedError: The step is damaged, and the request gives no reason to gather it
            nonetheless.
        InvalidRequestError: The step lacks an item, or an option is invalid.
        NotReadyError, IdempotencyKeyReusedError: See `JobStart`.
    """
    options = gather.gather_options(body.items, body.dtype)
    start = JobStart(plane, caller, root, gather.KIND, "checkpoint.gather", idempotency_key)
    fields = {"root": root, "run": run, "step": step, "options": options}
    if operation := start.earlier_operation({**fields, "despite_damage": body.despite_damage}):
        return operation
    stored_run = plane.run(root, run)
    info = stored_run.step(step)
    refuse_damaged(stored_run, info, despite_damage=body.despite_damage)
    options = gather.with_items(stored_run, info, options)
    request = export_request(
        gather.KIND,
        root=root,
        run=stored_run,
        step=info,
        options=options,
        rule_version=gather.RULE_VERSION,
        despite_damage=body.despite_damage,
    )
    return start.submit(request, exported=stored_run)
