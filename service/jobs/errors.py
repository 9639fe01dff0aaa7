"""Errors of jobs; see the tree in `cairn.service.errors`.

ServiceError
├── JobsBusyError                  a second engine in one process, or under one name
├── JobFailedError (.data)         a job failed; stores its problem body
│   └── PartsFailedError (.done)   a part of the job failed
└── ProblemError
    ├── OperationNotFoundError     404
    ├── OperationStateError        409
    ├── UnknownKindError           409
    ├── DamagedError               500
    ├── NotAllAdoptedError         422
    ├── JobEngineError             500
    ├── WorkerNotFoundError        404
    ├── WorkerAliveError           409
    └── IdempotencyKeyReusedError  422 (.key, .used)
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cairn.service.errors import ProblemError, ServiceError
from cairn.service.schemas import Operation

_STORE_FULL: Final = "urn:cairn:problem:store-full"


class JobsBusyError(ServiceError):
    """This process has a running job engine already, or another process has its name."""


class JobFailedError(ServiceError):
    """A job failed; DBOS stores `data`, the problem's JSON, with the operation."""

    def __init__(self, problem: Mapping[str, Any]) -> None:
        self.data = dict(problem)
        super().__init__(f"{self.data.get('title')}: {self.data.get('detail')}")

    @property
    def for_missing_space(self) -> bool:
        """True if the store had no space or quota left, so that the same job may succeed later."""
        return self.data.get("type") == _STORE_FULL


class PartsFailedError(JobFailedError):
    """A part of a job failed.

    Attributes:
        done: Results of all parts, in order; None for unfinished ones.
    """

    def __init__(self, problem: Mapping[str, Any], done: Sequence[dict[str, Any] | None]) -> None:
        super().__init__(problem)
        self.done = list(done)


class OperationNotFoundError(ProblemError):
    """No operation has this id."""

    status, slug, title = 404, "operation-not-found", "No such operation"

    def __init__(self, operation: str) -> None:
        super().__init__(f"There is no operation {operation}. `cairn operations` lists them.")


class OperationStateError(ProblemError):
    """The operation is in a state that does not allow this."""

    status, slug, title = 409, "operation-state", "The operation's state forbids this"


class UnknownKindError(ProblemError):
    """A newer server started the operation, and this one does not know its kind."""

    status, slug, title = 409, "unknown-kind", "The operation is of an unknown kind"


class WorkerNotFoundError(ProblemError):
    """No worker of this name was ever started."""

    status, slug, title = 404, "worker-not-found", "No such worker"


class WorkerAliveError(ProblemError):
    """The worker is alive, and continues its jobs."""

    status, slug, title = 409, "worker-alive", "The worker is alive"


class DamagedError(ProblemError):
    """A checkpoint differs from what was saved; `.extra` has the findings."""

    status, slug, title = 500, "damaged", "The checkpoint is damaged"


class NotAllAdoptedError(ProblemError):
    """A checkpoint of an imported folder is not listed, or has changed; `.extra` has the result."""

    status, slug, title = 422, "not-all-adopted", "Not all was adopted"


class JobEngineError(ProblemError):
    """The job engine failed unexpectedly."""

    status, slug, title = 500, "job-engine", "The job engine failed"


class IdempotencyKeyReusedError(ProblemError):
    """The idempotency key was used for another request.

    Attributes:
        used: Operation of that request.
    """

    status, slug, title = 422, "idempotency-key-reused", "Idempotency-Key was used before"

    def __init__(self, key: str | None, used: Operation, found: str = "another one") -> None:
        self.key, self.used = key, used
        super().__init__(
            f"Idempotency-Key {key!r} belongs to the request of operation {used.id}, and this is "
            f"{found}. Use a new key for a new request."
        )
