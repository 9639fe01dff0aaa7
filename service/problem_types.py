"""Types of the problems (RFC 9457) of the store, for answers of the server and for the command.

The command's exit status follows from the status here.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple

from cairn.storage import errors as storage_errors
from cairn.storage.errors import StorageError


class ProblemType(NamedTuple):
    """Type of a problem.

    Attributes:
        status: status of an HTTP answer.
        slug: last part of its URN.
        title: what happened, the same for every such problem.
    """

    status: int
    slug: str
    title: str


def storage_problem(error: StorageError) -> ProblemType:
    """Return the type of a problem of the store."""
    return next(ProblemType(*_STORAGE[kind]) for kind in type(error).__mro__ if kind in _STORAGE)


# The first class of an error's MRO that is in the table decides.
_STORAGE: Final[Mapping[type[BaseException], tuple[int, str, str]]] = {
    StorageError: (500, "storage", "The store failed"),
    storage_errors.InvalidURIError: (422, "invalid-uri", "Invalid name or URI"),
    storage_errors.NotFoundError: (404, "not-found", "Not found"),
    storage_errors.RunNotFoundError: (404, "run-not-found", "No such run"),
    storage_errors.StepNotFoundError: (404, "step-not-found", "No such step"),
    storage_errors.AliasNotFoundError: (404, "alias-not-found", "No such alias"),
    storage_errors.ArtifactNotFoundError: (404, "artifact-not-found", "No such artifact"),
    storage_errors.LeafNotFoundError: (404, "leaf-not-found", "No such leaf"),
    storage_errors.InvalidSliceError: (422, "invalid-slice", "No such part of the array"),
    storage_errors.NotACheckpointError: (422, "not-a-checkpoint", "Not a checkpoint"),
    storage_errors.PolicyError: (422, "invalid-policy", "The policy can't act"),
    storage_errors.RecordNotLostError: (422, "record-not-lost", "The record is not lost"),
    storage_errors.TreeMismatchError: (422, "tree-mismatch", "The checkpoint does not fit"),
    storage_errors.IteratorMismatchError: (422, "iterator-mismatch", "The iterators do not fit"),
    storage_errors.CorruptionError: (409, "corrupt", "Stored data is corrupt"),
    storage_errors.ConfinementError: (409, "leads-out", "Leads out of its run"),
    storage_errors.SourceRefusedError: (409, "source-refused", "No folder to adopt from"),
    storage_errors.PreconditionFailedError: (412, "precondition-failed", "Precondition failed"),
    storage_errors.StepExistsError: (409, "step-exists", "The step exists"),
    storage_errors.StepInFlightError: (409, "step-in-flight", "The step is being written"),
    storage_errors.StepChangedError: (409, "step-changed", "The step changed meanwhile"),
    storage_errors.StepDamagedError: (409, "step-damaged", "The step is damaged"),
    storage_errors.StepInUseError: (409, "step-in-use", "The step is in use"),
    storage_errors.LeaseHeldError: (409, "lease-held", "Another writer holds the run"),
    storage_errors.FencedError: (409, "fenced", "A later attempt has taken over"),
    storage_errors.LateProcessError: (503, "process-late", "A process of the job did not come"),
    storage_errors.StoreCheckError: (409, "store-unsound", "The store is not sound"),
    storage_errors.SaveError: (500, "save-failed", "A save failed"),
    storage_errors.StoreFullError: (507, "store-full", "The store is full"),
    storage_errors.StoreUnavailableError: (503, "store-unavailable", "The store does not answer"),
    storage_errors.UnsupportedLeafError: (422, "unsupported-leaf", "Unsupported leaf"),
    storage_errors.UnsupportedFormatError: (422, "unsupported-format", "Unsupported format"),
}
