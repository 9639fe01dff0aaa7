"""Export of a checkpoint as Hugging Face files or as one GGUF file."""

from typing import NamedTuple

from cairn.interop.weights.export import trainer_of
from cairn.service.access.callers import Caller
from cairn.service.actions.job_start import JobStart
from cairn.service.actions.plane import ControlPlane
from cairn.service.jobs.kinds import convert
from cairn.service.jobs.kinds.export_job import export_request
from cairn.service.jobs.kinds.trainer_settings import settings_beside
from cairn.service.schemas import ConvertRequest, Operation
from cairn.storage.runs.damage import refuse_damaged
from cairn.storage.safetensors.sizes import parse_size


class StoredBy(NamedTuple):
    """Other trainer that stored a step.

    Attributes:
        trainer: Its name.
        has_settings: Its own config lies beside the step, so that an export needs no other.
    """

    trainer: str
    has_settings: bool


def stored_by(plane: ControlPlane, root: str, run: str, step: int) -> StoredBy | None:
    """Return the other trainer whose model a listed step holds; None: no known one.

    Raises:
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        StoreUnavailableError: The store does not answer.
    """
    stored_run = plane.run(root, run)
    manifest = stored_run.manifest(stored_run.step(step))
    trainer = trainer_of(manifest)
    if trainer is None:
        return None
    return StoredBy(trainer, settings_beside(stored_run, manifest)[0] is not None)


def convert_checkpoint(
    plane: ControlPlane,
    caller: Caller,
    root: str,
    run: str,
    step: int,
    body: ConvertRequest,
    *,
    idempotency_key: str | None,
) -> Operation:
    """Start an export, as Hugging Face's files or as one GGUF.

    Raises:
        RunNotFoundError, StepNotFoundError, StepInFlightError: There is no such listed step.
        StepDamagedError: The step is damaged, and the request gives no reason to export it
            nonetheless.
        InvalidRequestError: The step has no configuration of a model, or an option is invalid.
        UnsupportedFormatError: `max_shard_size` or `memory` is no size.
        NotReadyError, IdempotencyKeyReusedError: See `JobStart`.
    """
    options = convert.requested_options(body)
    start = JobStart(plane, caller, root, convert.KIND, "checkpoint.convert", idempotency_key)
    memory = None if body.memory is None else parse_size(body.memory)
    fields = {"root": root, "run": run, "step": step, "options": options, "memory_bytes": memory}
    if operation := start.earlier_operation({**fields, "despite_damage": body.despite_damage}):
        return operation
    stored_run = plane.run(root, run)
    info = stored_run.step(step)
    refuse_damaged(stored_run, info, despite_damage=body.despite_damage)
    convert.check_convertible(stored_run, stored_run.manifest(info), options)
    request = export_request(
        convert.KIND,
        root=root,
        run=stored_run,
        step=info,
        options=options,
        rule_version=convert.RULE_VERSION,
        memory_bytes=memory,
        despite_damage=body.despite_damage,
    )
    return start.submit(request, exported=stored_run)
