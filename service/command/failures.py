"""Exit status and error text for each kind of failure.

The error text is one line for people or, with `--json`, an RFC 9457 problem for programs. The
command prints a problem of the control plane unchanged. `cairn --help` and the reference show the
tables of this module.
"""

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final

from cairn.installation import InstallationError
from cairn.interop.errors import InteropError
from cairn.service.errors import (
    AddressError,
    NoCheckpointError,
    OperationFailedError,
    ProblemError,
    ProblemResponseError,
    PullConflictError,
    ServerUnreachableError,
    ServiceError,
    SetUpError,
    WatchEndedError,
)
from cairn.service.problem_types import storage_problem
from cairn.service.sentences import detail_of, members_of
from cairn.storage.errors import StorageError


class ExitStatus(IntEnum):
    """Exit status of the command."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_FOUND = 3
    CONFLICT = 4
    REFUSED = 5
    NOT_READY = 6
    DAMAGED = 7
    OPERATION_FAILED = 8
    INTERRUPTED = 130
    READER_GONE = 141


MEANINGS: Final[Mapping[ExitStatus, str]] = {
    ExitStatus.DONE: "done",
    ExitStatus.FAILED: "failed for another reason than those below",
    ExitStatus.USAGE: "wrong usage: a name, an option or a value that cannot be",
    ExitStatus.NOT_FOUND: "there is no such run, step, alias, operation or root",
    ExitStatus.CONFLICT: "in conflict with what is there: taken, moved or in use",
    ExitStatus.REFUSED: "not permitted",
    ExitStatus.NOT_READY: "control plane or store do not answer, or not in time",
    ExitStatus.DAMAGED: "what is stored is damaged",
    ExitStatus.OPERATION_FAILED: "the job that was watched failed or was cancelled",
    ExitStatus.INTERRUPTED: "interrupted (Ctrl-C)",
    ExitStatus.READER_GONE: "the output was closed (broken pipe)",
}

_OF_ANSWERS: Final[Mapping[int, ExitStatus]] = {
    400: ExitStatus.USAGE,
    401: ExitStatus.REFUSED,
    403: ExitStatus.REFUSED,
    404: ExitStatus.NOT_FOUND,
    409: ExitStatus.CONFLICT,
    412: ExitStatus.CONFLICT,
    413: ExitStatus.USAGE,
    422: ExitStatus.USAGE,
    428: ExitStatus.CONFLICT,
    429: ExitStatus.NOT_READY,
    502: ExitStatus.NOT_READY,
    503: ExitStatus.NOT_READY,
    504: ExitStatus.NOT_READY,
}
_FOREIGN: Final = "about:blank"
_PREFIX: Final = "urn:cairn:problem:"
_DAMAGED: Final = {
    f"{_PREFIX}{slug}" for slug in ("corrupt", "damaged", "leads-out", "step-damaged")
}

# The first class in the error's MRO that has an entry decides; errors of the store have the types
# of the HTTP API.
_OF_ERRORS: Final[Mapping[type[Exception], tuple[ExitStatus, str, str]]] = {
    Exception: (ExitStatus.FAILED, "failed", "Failed"),
    InstallationError: (ExitStatus.FAILED, "installation", "A package is missing"),
    InteropError: (ExitStatus.USAGE, "invalid-model", "The model's config or map can't be used"),
    AddressError: (ExitStatus.USAGE, "invalid-address", "No address of a checkpoint"),
    NoCheckpointError: (ExitStatus.NOT_FOUND, "step-not-found", "No such step"),
    OperationFailedError: (
        ExitStatus.OPERATION_FAILED,
        "operation-failed",
        "The operation did not succeed",
    ),
    PullConflictError: (ExitStatus.CONFLICT, "pull-conflict", "The folder has something else"),
    SetUpError: (ExitStatus.CONFLICT, "set-up", "Set up already"),
    ServerUnreachableError: (ExitStatus.NOT_READY, "unreachable", "No control plane answers"),
    WatchEndedError: (ExitStatus.INTERRUPTED, "watch-ended", "Not watched any more"),
}
KNOWN: Final = (ServiceError, StorageError, InteropError, InstallationError)
"""Errors that users can act on; any other is a bug of the program, and shows a traceback."""


def exit_status(error: Exception) -> ExitStatus:
    """Map an error to an exit status."""
    if isinstance(error, ProblemResponseError):
        kind = str(error.problem.get("type"))
        if kind == _FOREIGN and error.status == 404:
            return ExitStatus.NOT_READY  # the answer is from another kind of server
        return _exit_status(error.status, kind)
    if isinstance(error, ProblemError):
        return _exit_status(error.status, _PREFIX + error.slug)
    return _kind(error)[0]


def _exit_status(status: int, kind: str) -> ExitStatus:
    """Map the status and the type of a problem to an exit status."""
    if kind in _DAMAGED:
        return ExitStatus.DAMAGED
    return _OF_ANSWERS.get(status, ExitStatus.FAILED)


def problem_of(error: Exception) -> dict[str, Any]:
    """Build the problem of an error; it has a `status` only if the HTTP API gives it one."""
    if isinstance(error, ProblemResponseError):
        return error.problem
    _, slug, title = _kind(error)
    problem: dict[str, Any] = {"type": _PREFIX + slug, "title": title, "detail": str(error)}
    if isinstance(error, ProblemError):
        problem |= {"type": _PREFIX + error.slug, "title": error.title, "status": error.status}
    if isinstance(error, StorageError | InteropError):
        problem |= {"detail": detail_of(error), **members_of(error)}
    return problem


def output_problem(detail: str) -> dict[str, Any]:
    """Build the problem of output that can't be written."""
    return {"type": f"{_PREFIX}output", "title": "The output was not written", "detail": detail}


def usage_problem(detail: str) -> dict[str, Any]:
    """Build the problem of wrong usage."""
    return {"type": f"{_PREFIX}usage", "title": "Wrong usage", "detail": detail}


def line_of(error: Exception) -> str:
    """Format an error for people."""
    text = str(problem_of(error).get("detail") or error)
    if not isinstance(error, ProblemResponseError):
        return text
    if exit_status(error) is not ExitStatus.NOT_READY:
        return text
    after = f"Try again in {error.retry_after} s. " if error.retry_after else ""
    return f"{text.rstrip('. ')}. {after}`cairn doctor` looks for the cause."


def as_json(problem: Mapping[str, Any]) -> str:
    """Format a problem as one line of JSON."""
    return json.dumps(problem)


def _kind(error: Exception) -> tuple[ExitStatus, str, str]:
    if isinstance(error, StorageError):
        status, slug, title = storage_problem(error)
        return _exit_status(status, _PREFIX + slug), slug, title
    return next(_OF_ERRORS[kind] for kind in type(error).__mro__ if kind in _OF_ERRORS)
