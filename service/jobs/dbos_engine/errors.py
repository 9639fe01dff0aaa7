"""Conversion of DBOS's errors to Cairn's, at the edge of this room.

Errors of DBOS's database are not converted: the table in `http.problems` has them.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from dbos import error as dbos_errors

from cairn.service.errors import NotReadyError, ProblemError
from cairn.service.jobs.errors import JobEngineError, OperationNotFoundError, OperationStateError

P = ParamSpec("P")
R = TypeVar("R")

# The first class of an error's MRO that is in the table decides.
ERRORS: Final[Mapping[type[BaseException], type[ProblemError]]] = {
    dbos_errors.DBOSException: JobEngineError,
    dbos_errors.DBOSBaseException: JobEngineError,
    dbos_errors.DBOSQueryTimeoutError: NotReadyError,
    dbos_errors.DBOSInitializationError: NotReadyError,
    dbos_errors.DBOSNonExistentWorkflowError: OperationNotFoundError,
    dbos_errors.DBOSConflictingWorkflowError: OperationStateError,
    dbos_errors.DBOSQueueDeduplicatedError: OperationStateError,
    dbos_errors.DBOSWorkflowIDInUseError: OperationStateError,
    dbos_errors.DBOSWorkflowCancelledError: OperationStateError,
    dbos_errors.DBOSWorkflowConflictIDError: OperationStateError,
}


def translated(call: Callable[P, R]) -> Callable[P, R]:
    """Wrap a function so that it raises Cairn's errors in place of DBOS's."""

    @wraps(call)
    def calling(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            return call(*arguments, **options)
        except (dbos_errors.DBOSException, dbos_errors.DBOSBaseException) as exc:
            kind = next(ERRORS[base] for base in type(exc).__mro__ if base in ERRORS)
            raise kind(f"the job engine: {exc}") from exc

    return calling
