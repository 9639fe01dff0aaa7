"""Starting an export, unless it has been made already: then its operation is the answer."""

from cairn.service.jobs.context import Request
from cairn.service.jobs.dbos_engine import Jobs
from cairn.service.jobs.errors import OperationNotFoundError
from cairn.service.jobs.kinds.export_job import made_by
from cairn.service.schemas import Operation, OperationState
from cairn.storage.runs import Run


def start_export(
    jobs: Jobs, run: Run, request: Request, *, idempotency_key: str | None
) -> Operation:
    """Start a job, or find the operation that is meant: also the one that has made the artifact.

    That one is known to the control plane that was asked for it. What another has made is found by
    the job; so is what is asked for by a key, which names an operation of its own.

    Args:
        jobs: Where.
        run: Of the checkpoint.
        request: As `export_request` makes it.
        idempotency_key: See `Jobs.start`.

    Raises:
        IdempotencyKeyReusedError: The key was used for another request.
    """
    kind = request["kind"]
    maker = None if idempotency_key else made_by(run, request)
    if maker is not None:
        try:
            operation = jobs.get(maker)
        except OperationNotFoundError:
            operation = None
        if (
            operation is not None
            and operation.state is OperationState.SUCCEEDED
            and (operation.kind, operation.request) == (kind, dict(request))
        ):
            return operation
    return jobs.start(kind, request, idempotency_key=idempotency_key)
