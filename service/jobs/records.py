"""Ids, names and states of jobs in the job engine's records, in the form of the API. Pure."""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from cairn.service.http.problems import problem_from
from cairn.service.schemas import OperationState, Problem

WORKFLOW_PREFIX: Final = "cairn."
_PART_MARK: Final = "."  # a character that operation ids do not have
PART: Final = "part"
"""Kind of a workflow that does a part of a job. It is no operation."""

# DBOS's statuses; its "PENDING" means that a worker has the job.
STATES: Final[Mapping[str, OperationState]] = {
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
    """Return the workflow name of a kind of jobs."""
    return f"{WORKFLOW_PREFIX}{kind}"


def kind_of(name: str) -> str:
    """Return the kind of the jobs whose workflows have a name."""
    return name.removeprefix(WORKFLOW_PREFIX)


def is_operation(name: str) -> bool:
    """Return whether workflows of this name are operations, of any kind."""
    return name.startswith(WORKFLOW_PREFIX) and name != workflow_name(PART)


def part_id(operation: str, token: str, number: int) -> str:
    """Return the id of a part of an operation; see `JobContext.parts`."""
    return f"{operation}{_PART_MARK}{token}{_PART_MARK}{number:05d}"


def whose(workflow_id: str) -> str:
    """Return the id of the operation that a workflow executes, or of which it executes a part."""
    return workflow_id.partition(_PART_MARK)[0]


def parts_of(operation: str) -> str:
    """Return the common prefix of the ids of an operation's parts."""
    return f"{operation}{_PART_MARK}"


def state_of(status: str) -> OperationState:
    """Return the state of an operation that a DBOS status stands for."""
    return STATES[status]


def statuses_of(state: OperationState | None) -> list[str]:
    """Return all DBOS statuses that stand for `state`; an empty list for None."""
    return [status for status, meant in STATES.items() if meant is state]


def operation_key(caller: str, root: str, idempotency_key: str) -> str:
    """Return the engine's key for an idempotency key, unique to the caller and the root.

    The server itself is a caller too, for its schedules and automations. Those callers have a colon
    in their names, which no name of a key may have, so no client can use their keys.

    Args:
        caller: Name of the caller.
        root: Name of the root that the request is about.
        idempotency_key: Key of the caller.
    """
    return json.dumps([caller, root, idempotency_key])


def operation_id(idempotency_key: str | None) -> str:
    """Return the id of the operation for a key from `operation_key`.

    Without a key, the id is new, and sorts after earlier ones.
    """
    if idempotency_key is None:
        return f"op-{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"
    return f"op-{hashlib.sha256(idempotency_key.encode()).hexdigest()[:32]}"


def moment(epoch_ms: int | None) -> datetime:
    """Return a moment from milliseconds since 1970."""
    return datetime.fromtimestamp((epoch_ms or 0) / 1000, UTC)


def failure_of(status: str, error_data: Any, instance: str) -> Problem:
    """Return the problem with which a job, or a part of it, has failed.

    Args:
        status: DBOS's status.
        error_data: `data` of a `JobFailedError`; anything else if it failed otherwise.
        instance: Path of the operation.
    """
    if status == _GIVEN_UP:
        return Problem(
            type="urn:cairn:problem:given-up",
            title="Given up",
            status=500,
            detail=(
                "The server ended each time it worked on the operation. See the server's log, then "
                "resume the operation."
            ),
            instance=instance,
        )
    if isinstance(error_data, Mapping):
        return Problem.model_validate(dict(error_data))
    return problem_from(RuntimeError("the job ended without a word"), instance=instance)
