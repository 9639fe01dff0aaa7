"""Starting a job."""

from collections.abc import Mapping
from typing import Any, Final

from cairn.service.access import Caller
from cairn.service.actions.auditing import audited
from cairn.service.actions.plane import ControlPlane
from cairn.service.jobs import start_export
from cairn.service.schemas import Operation
from cairn.storage.runs import Run

_PLACE: Final = ("root", "run", "by")


def start(
    plane: ControlPlane,
    caller: Caller,
    kind: str,
    request: Mapping[str, Any],
    *,
    action: str,
    idempotency_key: str | None,
    exported: Run | None = None,
) -> Operation:
    """Start a job, or find the one that is meant.

    Args:
        plane: Where.
        caller: Who asks.
        kind: Of the job.
        request: JSON object handed to it, with the root and the run that it is about.
        action: What the audit trail calls it.
        idempotency_key: The same key is the same operation, for good.
        exported: The run where an export lies, if it has been made already.

    Raises:
        NotReadyError: Jobs were not launched.
        IdempotencyKeyReusedError: The key was used for another request.
    """
    jobs = plane.jobs
    detail = {name: value for name, value in request.items() if name not in _PLACE}
    with audited(
        plane, caller, action, root=request["root"], run=request["run"], **detail
    ) as entry:
        if exported is None:
            operation = jobs.start(kind, request, idempotency_key=idempotency_key)
        else:
            operation = start_export(jobs, exported, request, idempotency_key=idempotency_key)
        entry.complete(operation=operation.id)
    return operation
