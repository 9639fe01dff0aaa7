"""Errors of the control plane, and what each becomes over HTTP: one RFC 9457 problem body.

ServiceError
├── SettingsError            a setting that cannot work
├── AddressError             a text that names no checkpoint
│   └── NoCheckpointError    a run that has none yet
├── OperationFailedError     a job that was watched did not succeed
├── WatchEndedError          a job is not watched any more, and goes on
├── PullError                what was pulled can't be served
├── ServeError               the server cannot start
├── BackupError              the databases cannot be copied
├── SetUpError               a folder is set up already, and otherwise
├── ClientError              what the HTTP client raises
│   ├── ServerUnreachableError
│   ├── DownloadError        what came is not what was saved
│   ├── EventsLostError
│   └── ProblemResponseError (.problem, .status, .retry_after)
└── ProblemError             raised by routes (.status, .slug, .title, .extra)
    ├── UnauthenticatedError      401
    ├── ForbiddenError            403
    ├── UnknownRootError          404
    ├── RunExistsError            409
    ├── AlreadyAdoptedError       409
    ├── RootTakenError            409
    ├── RootInUseError            409
    ├── FixedRootError            409
    ├── RootRefusedError          422
    ├── PreconditionRequiredError 428
    ├── AliasMovedError           412
    ├── ResourceChangedError      412
    ├── UnknownKeyError           404
    ├── UnknownWebhookError       404
    ├── UnknownDeliveryError      404
    ├── EventsPrunedError         410
    ├── KeyNameTakenError         409
    ├── GateRefusedError          409
    ├── AliasesStrandedError      409
    ├── InvalidRequestError       422
    ├── TargetRefusedError        422
    ├── TooManyRequestsError      429
    └── NotReadyError             503
"""

from collections.abc import Mapping
from typing import Any, ClassVar


class ServiceError(Exception):
    """Base of what the control plane raises."""


class SettingsError(ServiceError):
    """A setting that cannot work; the message names the variable."""


class AddressError(ServiceError):
    """A text that names no checkpoint."""


class NoCheckpointError(AddressError):
    """A run whose latest checkpoint was asked for, and that has none."""


class OperationFailedError(ServiceError):
    """A job that was watched failed or was cancelled."""


class WatchEndedError(ServiceError):
    """Whoever watched a job stopped watching; the job goes on."""


class PullError(ServiceError):
    """A folder can't serve what was pulled, or what came is not what was exported."""


class ServeError(ServiceError):
    """The server cannot start, for a reason outside its settings."""


class BackupError(ServiceError):
    """The databases cannot be copied."""


class SetUpError(ServiceError):
    """A folder is set up already, and not as it was asked for."""


class ClientError(ServiceError):
    """Base of what `cairn.service.client.client` raises."""


class ServerUnreachableError(ClientError):
    """No answer from the control plane."""


class DownloadError(ClientError):
    """What came is not what was saved, or can't be written where it should."""


class EventsLostError(ClientError):
    """Events were watched in a catalog that is not there any more."""


class ProblemResponseError(ClientError):
    """The control plane answered with a problem.

    Attributes:
        problem: The body of the answer.
        status: Of the answer.
        retry_after: Seconds after which to ask again, if the answer says so.
    """

    def __init__(
        self, problem: Mapping[str, Any], status: int, *, retry_after: int | None = None
    ) -> None:
        self.problem = dict(problem)
        self.status = status
        self.retry_after = retry_after
        super().__init__(f"{self.problem.get('title', status)}: {self.problem.get('detail', '')}")


class ProblemError(ServiceError):
    """An answer other than the one that was asked for, with its status and problem type."""

    status: ClassVar[int] = 500
    slug: ClassVar[str] = "internal"
    title: ClassVar[str] = "Internal error"

    def __init__(
        self,
        detail: str,
        *,
        errors: list[dict[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.errors = errors
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})


class UnauthenticatedError(ProblemError):
    """Nobody is known to ask: no key, or one that does not count (any more)."""

    status, slug, title = 401, "unauthenticated", "Not signed in"


class ForbiddenError(ProblemError):
    """Whoever asks may not have that done."""

    status, slug, title = 403, "forbidden", "Forbidden"


class UnknownRootError(ProblemError):
    """No root of that name is configured."""

    status, slug, title = 404, "root-not-found", "No such root"


class UnknownKeyError(ProblemError):
    """No key of a caller has that id."""

    status, slug, title = 404, "key-not-found", "No such key"


class UnknownWebhookError(ProblemError):
    """No webhook has that id."""

    status, slug, title = 404, "webhook-not-found", "No such webhook"


class UnknownDeliveryError(ProblemError):
    """The webhook has no delivery of that number."""

    status, slug, title = 404, "delivery-not-found", "No such delivery"


class EventsPrunedError(ProblemError):
    """Events were asked for that are not kept any more; `.extra` has how to go on."""

    status, slug, title = 410, "events-pruned", "These events are not kept any more"


class KeyNameTakenError(ProblemError):
    """A key that counts has that name."""

    status, slug, title = 409, "key-name-taken", "The name is taken"


class RunExistsError(ProblemError):
    """A new run was asked for under a name that is taken."""

    status, slug, title = 409, "run-exists", "The name is taken"


class AlreadyAdoptedError(ProblemError):
    """A folder was to be adopted that another run adopts; `.extra` has its `root` and `run`."""

    status, slug, title = 409, "already-adopted", "Another run adopts the folder"


class RootTakenError(ProblemError):
    """A root was to be added under the name, or in the place, of another."""

    status, slug, title = 409, "root-taken", "The name or the place is taken"


class RootInUseError(ProblemError):
    """A root was to be removed on which operations run; `.extra["operations"]` says which."""

    status, slug, title = 409, "root-in-use", "The root is in use"


class FixedRootError(ProblemError):
    """A root was to be removed that the settings name."""

    status, slug, title = 409, "root-fixed", "The settings name the root"


class RootRefusedError(ProblemError):
    """No root can be, or may be, where one was to be added."""

    status, slug, title = 422, "root-refused", "No root can be there"


class PreconditionRequiredError(ProblemError):
    """A change was asked for without saying what it is based on."""

    status, slug, title = 428, "precondition-required", "Precondition required"


class AliasMovedError(ProblemError):
    """The alias is not as the request expects; `.extra["current"]` is it, or None."""

    status, slug, title = 412, "precondition-failed", "Precondition failed"


class ResourceChangedError(ProblemError):
    """What is to be changed is not as the request expects; `.extra["current"]` is it."""

    status, slug, title = 412, "precondition-failed", "Precondition failed"


class GateRefusedError(ProblemError):
    """A step is not what an alias asks for; `.extra["gates"]` says in what."""

    status, slug, title = 409, "gate-refused", "The step does not pass the alias's gates"


class AliasesStrandedError(ProblemError):
    """Aliases name steps that a rollback would set aside; `.extra["aliases"]` says which."""

    status, slug, title = 409, "aliases-stranded", "Aliases would be stranded"


class InvalidRequestError(ProblemError):
    """A well-formed request that asks for something impossible."""

    status, slug, title = 422, "invalid-request", "Invalid request"


class TargetRefusedError(ProblemError):
    """Events may not be sent where a webhook says."""

    status, slug, title = 422, "webhook-target-refused", "Nothing is sent there"


class TooManyRequestsError(ProblemError):
    """Whoever asks does so too often; `Retry-After` says when to come back."""

    status, slug, title = 429, "too-many-requests", "Too many requests"


class NotReadyError(ProblemError):
    """A part that requests need is not usable now."""

    status, slug, title = 503, "not-ready", "Not ready"
