"""Errors of the control plane; over HTTP each becomes one RFC 9457 problem body.

ServiceError
├── SettingsError            a setting is invalid
├── AddressError             a text is not the address of a checkpoint
│   └── NoCheckpointError    a run has no checkpoint yet
├── OperationFailedError     a watched job did not succeed
├── WatchEndedError          the watch of a job ended; the job goes on
├── PullError                the pulled files cannot be served
│   └── PullConflictError    the folder is in use, or has something else
├── ServeError               the server cannot start
├── BackupError              the databases cannot be copied
├── SetUpError               a folder is set up already, in another way
├── ClientError              base of the HTTP client's errors
│   ├── ServerUnreachableError
│   ├── DownloadError        the downloaded bytes differ from the saved ones
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
    ├── FixedPolicyError          409
    ├── RootRefusedError          422
    ├── PreconditionRequiredError 428
    ├── AliasMovedError           412
    ├── PolicyChangedError        412
    ├── ResourceChangedError      412
    ├── UnknownKeyError           404
    ├── UnknownWebhookError       404
    ├── UnknownPolicyError        404
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
    """Base of the control plane's errors."""


class SettingsError(ServiceError):
    """A setting is invalid; the message names the variable."""


class AddressError(ServiceError):
    """A text is not the address of a checkpoint."""


class NoCheckpointError(AddressError):
    """A run has no checkpoint that the address could mean."""


class OperationFailedError(ServiceError):
    """A watched job failed or was cancelled."""


class WatchEndedError(ServiceError):
    """The watch of a job ended; the job goes on."""


class PullError(ServiceError):
    """A folder cannot serve the pulled files, or they differ from the export."""


class PullConflictError(PullError):
    """A folder is in use by another pull, or has something that a pull would replace."""


class ServeError(ServiceError):
    """The server cannot start, for a reason outside its settings."""


class BackupError(ServiceError):
    """The databases cannot be copied."""


class SetUpError(ServiceError):
    """A folder is set up already, in another way than requested."""


class ClientError(ServiceError):
    """Base of the errors of `cairn.service.client.client`."""


class ServerUnreachableError(ClientError):
    """The control plane does not answer."""


class DownloadError(ClientError):
    """The downloaded bytes differ from the saved ones, or cannot be written."""


class EventsLostError(ClientError):
    """The events that were watched are gone: their catalog was created anew or restored."""


class ProblemResponseError(ClientError):
    """The control plane answered with a problem.

    Attributes:
        problem: Body of the answer.
        status: HTTP status of the answer.
        retry_after: Seconds to wait before the next request; None: the answer names none.
    """

    def __init__(
        self, problem: Mapping[str, Any], status: int, *, retry_after: int | None = None
    ) -> None:
        self.problem = dict(problem)
        self.status = status
        self.retry_after = retry_after
        super().__init__(f"{self.problem.get('title', status)}: {self.problem.get('detail', '')}")


class ProblemError(ServiceError):
    """Base of errors that become a problem answer, with its status and problem type."""

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
    """The request has no key or token, or an invalid one."""

    status, slug, title = 401, "unauthenticated", "Not signed in"


class ForbiddenError(ProblemError):
    """The caller lacks the permission."""

    status, slug, title = 403, "forbidden", "Forbidden"


class UnknownRootError(ProblemError):
    """No root has this name."""

    status, slug, title = 404, "root-not-found", "No such root"


class UnknownKeyError(ProblemError):
    """No key has this id."""

    status, slug, title = 404, "key-not-found", "No such key"


class UnknownWebhookError(ProblemError):
    """No webhook has this id."""

    status, slug, title = 404, "webhook-not-found", "No such webhook"


class UnknownPolicyError(ProblemError):
    """The root has no policy of this kind and name."""

    status, slug, title = 404, "policy-not-found", "No such policy"


class UnknownDeliveryError(ProblemError):
    """The webhook has no delivery of this number."""

    status, slug, title = 404, "delivery-not-found", "No such delivery"


class EventsPrunedError(ProblemError):
    """The requested events have been pruned; `.extra` has the id to continue from."""

    status, slug, title = 410, "events-pruned", "These events are not kept any more"


class KeyNameTakenError(ProblemError):
    """Another valid key has this name."""

    status, slug, title = 409, "key-name-taken", "The name is taken"


class RunExistsError(ProblemError):
    """The name of the new run is taken."""

    status, slug, title = 409, "run-exists", "The name is taken"


class AlreadyAdoptedError(ProblemError):
    """Another run has imported the folder; `.extra` has its `root` and `run`."""

    status, slug, title = 409, "already-adopted", "Another run adopts the folder"


class RootTakenError(ProblemError):
    """Another root has the name or the address."""

    status, slug, title = 409, "root-taken", "The name or the place is taken"


class RootInUseError(ProblemError):
    """Operations run on the root that was to be removed; `.extra["operations"]` has their ids."""

    status, slug, title = 409, "root-in-use", "The root is in use"


class FixedRootError(ProblemError):
    """The root that was to be removed comes from the settings."""

    status, slug, title = 409, "root-fixed", "The settings name the root"


class FixedPolicyError(ProblemError):
    """The policy that was to be changed comes from the environment of the servers."""

    status, slug, title = 409, "policy-fixed", "The environment names the policy"


class RootRefusedError(ProblemError):
    """A root cannot be added at this address."""

    status, slug, title = 422, "root-refused", "No root can be there"


class PreconditionRequiredError(ProblemError):
    """A change lacks the version that it is based on (`If-Match`)."""

    status, slug, title = 428, "precondition-required", "Precondition required"


class AliasMovedError(ProblemError):
    """The alias is not as the request expects; `.extra["current"]` is its value now, or None."""

    status, slug, title = 412, "precondition-failed", "Precondition failed"


class PolicyChangedError(ProblemError):
    """The policy is not as the request expects; `.extra["current"]` is its value now, or None."""

    status, slug, title = 412, "precondition-failed", "Precondition failed"


class ResourceChangedError(ProblemError):
    """The resource is not as the request expects; `.extra["current"]` is its current value."""

    status, slug, title = 412, "precondition-failed", "Precondition failed"


class GateRefusedError(ProblemError):
    """The step does not pass the alias's gates; `.extra["gates"]` has the reasons."""

    status, slug, title = 409, "gate-refused", "Promotion blocked"


class AliasesStrandedError(ProblemError):
    """Aliases name steps that a rollback would supersede; `.extra["aliases"]` has their names."""

    status, slug, title = 409, "aliases-stranded", "Aliases would be stranded"


class InvalidRequestError(ProblemError):
    """A request has the right form, but cannot be carried out."""

    status, slug, title = 422, "invalid-request", "Invalid request"


class TargetRefusedError(ProblemError):
    """Events may not be sent to the webhook's URL."""

    status, slug, title = 422, "webhook-target-refused", "Nothing is sent there"


class TooManyRequestsError(ProblemError):
    """The caller sends too many requests; the header `Retry-After` has the seconds to wait."""

    status, slug, title = 429, "too-many-requests", "Too many requests"


class NotReadyError(ProblemError):
    """A needed part of the server is not usable now."""

    status, slug, title = 503, "not-ready", "Not ready"
