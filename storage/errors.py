r"""Every error that `storage` raises, and the one map from errors of other libraries to them.

StorageError
├── InvalidURIError (ValueError)            a URI, name or key that is malformed or leaves its root
├── NotFoundError (FileNotFoundError)
│   ├── RunNotFoundError
│   ├── StepNotFoundError
│   ├── AliasNotFoundError
│   ├── ArtifactNotFoundError
│   └── LeafNotFoundError
├── InvalidSliceError (IndexError)          a slice beyond the array
├── NotACheckpointError (ValueError)        a folder that is no checkpoint
├── UnsupportedFormatError (ValueError)     another format or version, or not JSON of the kind
├── PolicyError (ValueError)                a retention or save policy that can't act
├── RecordNotLostError (ValueError)         a request to forget a record that is not lost
├── TreeMismatchError (ValueError)          requested and stored tree differ; lists all differences
├── IteratorMismatchError (ValueError)      data iterators can't resume at a step; lists all
├── UnsupportedLeafError (TypeError and ValueError)  a leaf that can't be stored
├── CorruptionError                         bytes that fail their check
│   └── ConfinementError                    a link that leads out of its run
├── SourceRefusedError                      files of an imported step outside the allowed folders
├── PreconditionFailedError                 a compare-and-swap that lost
├── StepExistsError                         a save at or below the latest step
├── StepInFlightError                       a step that is being written now
├── StepInUseError                          a deletion of what an alias or another step needs
├── StepChangedError                        a promotion of a step that was deleted meanwhile
├── StepDamagedError                        a step whose verification has failed
├── LeaseHeldError                          another writer holds the run
├── FencedError                             a later attempt took the run over
├── LateProcessError (TimeoutError)         stragglers of the job, named
├── StoreCheckError                       a store without what runs require; lists why
├── SaveError                               a save that failed in the background
│   └── StoreFullError (OSError)            no space or quota left
└── StoreUnavailableError (OSError)         no answer, no permission, or too many failures
"""

import errno
import re
from collections.abc import Iterable
from typing import Self

__all__ = [
    "AliasNotFoundError",
    "ArtifactNotFoundError",
    "ConfinementError",
    "CorruptionError",
    "FencedError",
    "InvalidSliceError",
    "InvalidURIError",
    "IteratorMismatchError",
    "LateProcessError",
    "LeafNotFoundError",
    "LeaseHeldError",
    "NotACheckpointError",
    "NotFoundError",
    "PolicyError",
    "PreconditionFailedError",
    "RecordNotLostError",
    "RunNotFoundError",
    "SaveError",
    "SourceRefusedError",
    "StepChangedError",
    "StepDamagedError",
    "StepExistsError",
    "StepInFlightError",
    "StepInUseError",
    "StepNotFoundError",
    "StorageError",
    "StoreCheckError",
    "StoreFullError",
    "StoreUnavailableError",
    "TreeMismatchError",
    "UnsupportedFormatError",
    "UnsupportedLeafError",
    "as_no_answer",
    "translate_error",
    "unconfirmed_change",
]


class StorageError(Exception):
    """Base of all errors of `storage`.

    The message has the path, what was expected, what was found, and what to do next; each part is
    also an attribute.

    Attributes:
        problems: all problems, one line each, for errors that can have several.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        path: object = "",
        expected: object = "",
        found: object = "",
        next_step: str = "",
        problems: Iterable[str] = (),
    ) -> None:
        self.message = message or ""
        self.path = str(path)
        self.expected = str(expected)
        self.found = str(found)
        self.next_step = next_step
        self.problems = tuple(problems)
        lead = _compose(message, self.path, self.expected, self.found, next_step)
        super().__init__("\n  - ".join((lead, *self.problems)))

    def without_traceback(self) -> Self:
        """Drop traceback and causes, whose frames keep data in memory; return this error."""
        self.__cause__ = self.__context__ = None
        return self.with_traceback(None)


def _compose(message: str | None, path: str, expected: str, found: str, next_step: str) -> str:
    """Return the parts joined into one line: "message: path: expected …, found …. Next step."."""
    comparison = ", ".join(
        part for part in (expected and f"expected {expected}", found and f"found {found}") if part
    )
    lead = ": ".join(part for part in (message, path, comparison) if part)
    if not next_step:
        return lead
    return f"{lead.rstrip('.')}. {next_step}" if lead else next_step


class InvalidURIError(StorageError, ValueError):
    """A URI, name or key is malformed, has a foreign scheme, or leads out of its root."""


class NotFoundError(StorageError, FileNotFoundError):
    """A named object does not exist in the store."""


class RunNotFoundError(NotFoundError):
    """The folder holds no run."""


class StepNotFoundError(NotFoundError):
    """The run does not list this step."""


class AliasNotFoundError(NotFoundError):
    """The run has no such alias."""


class ArtifactNotFoundError(NotFoundError):
    """There is no such export, or it has no such file."""


class LeafNotFoundError(NotFoundError):
    """The step has no such item, leaf or tensor."""


class InvalidSliceError(StorageError, IndexError):
    """The requested slice lies beyond the array."""


class NotACheckpointError(StorageError, ValueError):
    """The folder is no checkpoint."""


class UnsupportedFormatError(StorageError, ValueError):
    """A stored object has a format or version that this release does not read."""


class PolicyError(StorageError, ValueError):
    """A retention or save policy can't act; lists every problem."""


class RecordNotLostError(StorageError, ValueError):
    """The record to forget is intact, or can be rebuilt."""


class UnsupportedLeafError(StorageError, TypeError, ValueError):
    """A leaf of the tree can't be stored (Orbax raises TypeError or ValueError for it)."""


class TreeMismatchError(StorageError, ValueError):
    """The requested tree differs from the stored tree.

    Attributes:
        problems: every difference, one line each.
    """


class IteratorMismatchError(StorageError, ValueError):
    """Iterators of training data can't resume at their position in the step.

    Attributes:
        problems: every mismatch with the name of its iterator, one line each.
    """


class CorruptionError(StorageError):
    """Stored bytes fail their check.

    Attributes:
        problems: every file or leaf that fails, one line each, if several were checked.
    """


class ConfinementError(CorruptionError):
    """A link leads out of the folder that it may not leave, or a file is no regular file."""


class SourceRefusedError(StorageError):
    """An imported step's files lie outside the folders that the administrator allows."""


class PreconditionFailedError(StorageError):
    """A conditional write lost: the object has changed since the caller read it.

    Attributes:
        current: the stored value; None if nothing is stored or the value is unknown.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        path: object = "",
        expected: object = "",
        found: object = "",
        next_step: str = "",
        current: object = None,
    ) -> None:
        self.current = current
        super().__init__(message, path=path, expected=expected, found=found, next_step=next_step)


class StepExistsError(StorageError):
    """The saved step is at or below the latest listed one, and overwrite was not requested."""


class StepInFlightError(StorageError):
    """The step is still being written."""


class StepInUseError(StorageError):
    """The step can't be deleted: an alias names it, or other steps refer to it."""


class StepChangedError(StorageError):
    """The step was deleted during its promotion; the alias is unchanged."""


class StepDamagedError(StorageError):
    """The step is damaged: its last verification failed."""


class LeaseHeldError(StorageError):
    """Another writer holds the run.

    Attributes:
        holder: the writer id that holds the lease.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        path: object = "",
        expected: object = "",
        found: object = "",
        next_step: str = "",
        holder: str = "",
    ) -> None:
        self.holder = holder
        super().__init__(message, path=path, expected=expected, found=found, next_step=next_step)


class FencedError(StorageError):
    """A later attempt took the run over; this writer must stop."""


class LateProcessError(StorageError, TimeoutError):
    """Processes of a job did not arrive at the barrier where the others wait, or are at another."""


class StoreCheckError(StorageError):
    """The store does not do what the run protocol requires; nothing is written to it.

    Attributes:
        problems: every violation, one line each.
    """


class SaveError(StorageError):
    """A save failed after `save` had returned to the caller."""


class StoreFullError(SaveError, OSError):
    """The disk, the quota or the file size limit is exhausted; `errno` says which."""


class StoreUnavailableError(StorageError, OSError):
    """The store gave no usable answer: unreachable, refused, or failing repeatedly."""


_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
_FAILED = {
    *(errno.EIO, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ENOTCONN),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EBUSY),
}
"""Error numbers of failures of the disk, the mount or this machine; stored data may be intact."""

# TensorStore raises ValueError("STATUS_NAME: text [os_error_code='28']"), or http_response_code.
_STATUS = re.compile(r"^([A-Z][A-Z_]+):")
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'|\[OS error (\d+)")
_HTTP_CODE = re.compile(r"http_response_code='(\d{3})'|HTTP response code: (\d{3})")

_CLIENTS = ("aiohttp", "requests", "urllib3", "botocore")

_FULL_NEXT = "Free space or raise the quota, then try again; what was stored before is untouched."
_DOWN_NEXT = "Check that the store can be reached from here, then try again."
_NO_FOLDER_NEXT = "Give a path whose parents are folders; a file is in the way here."
_MISSING_NEXT = (
    "Check the path, and that no link on it leads nowhere; "
    "a bucket must exist before anything is stored in it."
)
_FAILED_NEXT = "See the system's log for the disk or the mount, then try again."
_REFUSED_NEXT = "Check the credentials and the permissions on the store."


def translate_error(exc: BaseException, *, path: object) -> StorageError:
    """Return the `StorageError` for an error of another library; raise it `from` that error.

    It maps OSError (by errno), TensorStore's ValueErrors (by status, errno and HTTP code in the
    text), and the HTTP errors of gcsfs and aiohttp (by `code` or `status`). If `exc` itself is not
    one of these, its causes are tried in turn. A `StorageError` is returned unchanged.
    """
    seen: set[int] = set()
    link: BaseException | None = exc
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        error = link if isinstance(link, StorageError) else _translate_one(link, str(path))
        if error is not None:
            return error
        link = link.__cause__ or link.__context__
    return StorageError("the store failed", path=path, found=_text(exc))


def as_no_answer(exc: BaseException, *, path: object) -> StoreUnavailableError | None:
    """Return the error for a read without an answer; None if `exc` is about the data.

    An exhausted request quota counts as no answer.
    """
    error = translate_error(exc, path=path)
    if isinstance(error, StoreFullError):
        return _unavailable(str(path), error.found)
    return error if isinstance(error, StoreUnavailableError) else None


def unconfirmed_change(error: StorageError, path: object, found: str) -> StorageError:
    """Return the error for a change that failed on the disk but may have been made.

    Args:
        error: the disk's error.
        path: path of the object.
        found: what is known about the change, for the message.
    """
    kind = StoreFullError if isinstance(error, StoreFullError) else StoreUnavailableError
    unconfirmed = kind(
        "the disk failed while an object was changed",
        path=path,
        expected="a change that it keeps",
        found=f"{found} ({error.found})",
        next_step="Try again once the disk is well: what is made counts as made.",
    )
    unconfirmed.errno = error.errno if isinstance(error, OSError) else None
    return unconfirmed


def _translate_one(exc: BaseException, path: str) -> StorageError | None:
    text = _text(exc)
    code = _http_code(exc)
    number = _os_error_number(exc)
    if number in _FULL or code == 507:
        return _full(path, text, number)
    if number == errno.ENOTDIR:
        return NotFoundError(
            "not a folder", path=path, expected="a folder", found=text, next_step=_NO_FOLDER_NEXT
        )
    if number == errno.ENOENT or code == 404:
        return _missing(path, text)
    forbidden = code in (401, 403) or text.startswith("Forbidden:")  # gcsfs's form
    if number in _REFUSED or forbidden or _is_from(exc, "google.auth"):
        if forbidden and "quota" in text.lower():
            return _full(path, text, errno.EDQUOT)
        return StoreUnavailableError(
            "the store refused access", path=path, found=text, next_step=_REFUSED_NEXT
        )
    if number in _FAILED:
        return StoreUnavailableError(
            "the disk failed", path=path, found=text, next_step=_FAILED_NEXT
        )
    if code == 412 or (isinstance(exc, FileExistsError) and number is None):  # gcsfs's form
        return PreconditionFailedError("changed by someone else", path=path, found=text)
    if code == 429 or (code is not None and code >= 500):
        return _unavailable(path, text)
    if isinstance(exc, TimeoutError | ConnectionError) or _is_from(exc, *_CLIENTS):
        return _unavailable(path, text)
    if isinstance(exc, ValueError):
        return _from_status(text, path)
    return None


def _from_status(text: str, path: str) -> StorageError | None:
    status = _STATUS.match(text)
    match status.group(1) if status else None:
        case "RESOURCE_EXHAUSTED":
            return _full(path, text, errno.ENOSPC)
        case "NOT_FOUND":
            return _missing(path, text)
        case "PERMISSION_DENIED" | "UNAUTHENTICATED":
            return StoreUnavailableError(
                "the store refused access", path=path, found=text, next_step=_REFUSED_NEXT
            )
        case "UNAVAILABLE" | "DEADLINE_EXCEEDED" | "ABORTED" | "CANCELLED":
            return _unavailable(path, text)
        case "DATA_LOSS":
            return CorruptionError("corrupt data", path=path, found=text)
        case _:
            return None


def _full(path: str, text: str, number: int | None) -> StoreFullError:
    error = StoreFullError("the store is full", path=path, found=text, next_step=_FULL_NEXT)
    error.errno = number or errno.ENOSPC
    return error


def _missing(path: str, text: str) -> NotFoundError:
    return NotFoundError("not found", path=path, found=text, next_step=_MISSING_NEXT)


def _unavailable(path: str, text: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        "the store does not answer", path=path, found=text, next_step=_DOWN_NEXT
    )


def _text(exc: BaseException) -> str:
    """Return the error's text on one line, at most 400 characters; its type if it has none."""
    return " ".join(str(exc).split())[:400] or type(exc).__name__


def _os_error_number(exc: BaseException) -> int | None:
    if isinstance(exc, OSError) and exc.errno is not None:
        return int(exc.errno)
    if isinstance(exc, FileNotFoundError):
        return errno.ENOENT
    if isinstance(exc, PermissionError):
        return errno.EACCES
    inside = _OS_ERROR.search(str(exc)) if isinstance(exc, ValueError) else None
    return int(inside.group(1) or inside.group(2)) if inside else None


def _http_code(exc: BaseException) -> int | None:
    for name in ("code", "status"):
        value = getattr(exc, name, None)
        if isinstance(value, int) and 100 <= value <= 599:
            return value
    answer = getattr(exc, "response", None)
    if isinstance(answer, dict) and "ResponseMetadata" in answer:  # botocore's form
        return int(answer["ResponseMetadata"].get("HTTPStatusCode", 0)) or None
    inside = _HTTP_CODE.search(str(exc)) if isinstance(exc, ValueError) else None
    return int(inside.group(1) or inside.group(2)) if inside else None


def _is_from(exc: BaseException, *packages: str) -> bool:
    """Return True if the error's class or a base is from these packages, which are not imported."""
    return any(
        f"{kind.__module__}.".startswith(f"{package}.")
        for kind in type(exc).__mro__
        for package in packages
    )
