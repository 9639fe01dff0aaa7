"""From what the job engine keeps to what the API shows. Pure."""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from cairn.service.http import problem_from
from cairn.service.schemas import Operation, OperationState, Problem, Progress

_WORKFLOW_PREFIX: Final = "cairn."
_PART_MARK: Final = "."  # in no operation's id
PART: Final = "part"
"""The kind of what does a part of a job. It is no operation."""

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
_GIVEN_UP: Final = "MAX_RECOVERY_ATTEMPTS_EXCEEDED"


def workflow_name(kind: str) -> str:
    """The name under which jobs of a kind are kept."""
    return f"{_WORKFLOW_PREFIX}{kind}"


def kind_of(name: str) -> str:
    """The kind of the jobs that are kept under a name."""
    return name.removeprefix(_WORKFLOW_PREFIX)


def is_operation(name: str) -> bool:
    """Whether what is kept under a name are operations, of whatever kind."""
    return name.startswith(_WORKFLOW_PREFIX) and name != workflow_name(PART)


def part_id(operation: str, token: str, number: int) -> str:
    """The id of a part of an operation; see `JobContext.parts`."""
    return f"{operation}{_PART_MARK}{token}{_PART_MARK}{number:05d}"


def whose(workflow_id: str) -> str:
    """The operation that a workflow is, or is a part of."""
    return workflow_id.partition(_PART_MARK)[0]


def parts_of(operation: str) -> str:
    """What the ids of all parts of an operation start with."""
    return f"{operation}{_PART_MARK}"


def state_of(status: str) -> OperationState:
    """What DBOS's status means."""
    return _STATES[status]


def statuses_of(state: OperationState | None) -> list[str]:
    """Every status that means `state`; none for None."""
    return [status for status, meant in _STATES.items() if meant is state]


def operation_key(caller: str, root: str, idempotency_key: str) -> str:
    """The engine's key of a request: callers never share one, nor do the roots of a caller.

    The server is a caller too, for its schedules and automations. Their names have a colon, which
    no key's name has, so nobody else can ask under one.

    Args:
        caller: Name of who asks.
        root: Name of the root that the request is about.
        idempotency_key: That they give it.
    """
    return json.dumps([caller, root, idempotency_key])


def operation_id(idempotency_key: str | None) -> str:
    """The id that belongs to the key; without one a new id, later ones sorting after it."""
    if idempotency_key is None:
        return f"op-{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"
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
    state = state_of(status)
    instance = f"/v1/operations/{workflow_id}"
    error = failure_of(status, error_data, instance) if state is OperationState.FAILED else None
    return Operation(
        id=workflow_id,
        kind=kind_of(name),
        state=state,
        progress=Progress.model_validate(dict(progress)),
        request=dict(request),
        result=output if state is OperationState.SUCCEEDED else None,
        error=error,
        created=moment(created_ms),
        updated=moment(updated_ms),
    )


def failure_of(status: str, error_data: Any, instance: str) -> Problem:
    """Why a job, or a part of it, has failed.

    Args:
        status: DBOS's.
        error_data: What a `JobFailedError` carried; anything else if it failed otherwise.
        instance: The operation's address.
    """
    return _given_up(instance) if status == _GIVEN_UP else _problem(error_data, instance)


def _given_up(instance: str) -> Problem:
    return Problem(
        type="urn:cairn:problem:given-up",
        title="Given up",
        status=500,
        detail=(
            "expected the server to outlive the operation, found that it ended each time that it "
            "took the operation up again. See the server's log, then resume the operation."
        ),
        instance=instance,
    )


def _problem(data: Any, instance: str) -> Problem:
    if isinstance(data, Mapping):
        return Problem.model_validate(dict(data))
    return problem_from(RuntimeError("the job ended without a word"), instance=instance)
