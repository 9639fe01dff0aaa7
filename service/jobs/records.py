"""From what the job engine keeps to what the API shows. Pure."""

import hashlib
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from service.problems import problem_from
from service.schemas import Operation, OperationKind, OperationState, Problem, Progress

_WORKFLOW_PREFIX: Final = "cairn."

# DBOS's word for each state; "PENDING" there means that a worker has it.
_STATES: Final[Mapping[str, OperationState]] = {
    "DELAYED": OperationState.PENDING,
    "ENQUEUED": OperationState.PENDING,
    "PENDING": OperationState.RUNNING,
    "SUCCESS": OperationState.SUCCEEDED,
    "ERROR": OperationState.FAILED,
    "MAX_RECOVERY_ATTEMPTS_EXCEEDED": OperationState.FAILED,
    "CANCELLED": OperationState.CANCELLED,
}
CANCELLED: Final = "CANCELLED"


def workflow_name(kind: str) -> str:
    """The name under which jobs of a kind are kept."""
    return f"{_WORKFLOW_PREFIX}{kind}"


def statuses_of(state: OperationState | None) -> list[str]:
    """Every status that means `state`; none for None."""
    return [status for status, meant in _STATES.items() if meant is state]


def operation_id(idempotency_key: str | None) -> str:
    """A new id, or the one that belongs to the key."""
    if idempotency_key is None:
        return f"op-{uuid.uuid4().hex}"
    return f"op-{hashlib.sha256(idempotency_key.encode()).hexdigest()[:32]}"


def moment(epoch_ms: int | None) -> datetime:
    """A moment from milliseconds since 1970."""
    return datetime.fromtimestamp((epoch_ms or 0) / 1000, UTC)


def operation_of(
    *,
    workflow_id: str,
    name: str,
    status: str,
    request: Mapping[str, Any],
    progress: Mapping[str, Any],
    output: Any,
    error_data: Any,
    created_ms: int | None,
    updated_ms: int | None,
) -> Operation:
    """One job as the API shows it.

    Args:
        workflow_id: The operation's id.
        name: As `workflow_name` made it.
        status: DBOS's.
        request: What it was started with.
        progress: Its last report.
        output: What it returned, if it has.
        error_data: What a `JobFailedError` carried; anything else if it failed otherwise.
        created_ms: Milliseconds since 1970.
        updated_ms: Milliseconds since 1970.
    """
    state = _STATES[status]
    failed = state is OperationState.FAILED
    return Operation(
        id=workflow_id,
        kind=OperationKind(name.removeprefix(_WORKFLOW_PREFIX)),
        state=state,
        progress=Progress.model_validate(dict(progress)),
        request=dict(request),
        result=output if state is OperationState.SUCCEEDED else None,
        error=_problem(error_data, f"/v1/operations/{workflow_id}") if failed else None,
        created=moment(created_ms),
        updated=moment(updated_ms),
    )


def _problem(data: Any, instance: str) -> Problem:
    if isinstance(data, Mapping):
        return Problem.model_validate(dict(data))
    return problem_from(RuntimeError("the job ended without a word"), instance=instance)
