"""Start of an export, or the operation that has made it already."""

from cairn.service.jobs.context import Request
from cairn.service.jobs.dbos_engine.jobs import Jobs
from cairn.service.jobs.errors import OperationNotFoundError
from cairn.service.jobs.kinds.export_job import made_by
from cairn.service.schemas import Operation, OperationState
from cairn.storage.runs.run import Run


def start_export(
    jobs: Jobs, run: Run, request: Request, *, idempotency_key: str | None
) -> Operation:
    """Start an export, or return the operation that runs it or has made the artifact.

    An operation of another control plane is unknown here, so a job is started, which finds the
    artifact. The same holds for a request with a key, since a key names an operation of its own.

    Args:
        jobs: Jobs of this server.
        run: Run of the checkpoint.
        request: Request from `export_request`.
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
