"""Errors of the GCS double, each of them one HTTP answer.

ApiError                 a refused request: a status, a reason and a message, as JSON
 ├─ InvalidRequestError  400
 ├─ NotFoundError        404
 ├─ ConflictError        409
 ├─ PreconditionError    412
 └─ NotModifiedError     304, which has no body
FolderInUseError         two doubles on one folder
ConnectionLostError      the peer went away, or a fault says that it shall look so: no answer
"""

from __future__ import annotations


class ApiError(Exception):
    """A refused request.

    Args:
        status: HTTP status.
        reason: the short word that Google's JSON errors carry, such as `notFound`.
        message: what was wrong, for people.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message

    def body(self) -> dict[str, object]:
        """The JSON that Google answers with."""
        detail = {"message": self.message, "domain": "global", "reason": self.reason}
        return {"error": {"code": self.status, "message": self.message, "errors": [detail]}}


class InvalidRequestError(ApiError):
    def __init__(self, message: str, *, reason: str = "invalid") -> None:
        super().__init__(400, reason, message)


class NotFoundError(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(404, "notFound", message)


class ConflictError(ApiError):
    def __init__(self, message: str) -> None:
        super().__init__(409, "conflict", message)


class PreconditionError(ApiError):
    def __init__(self, condition: str) -> None:
        message = (
            "At least one of the pre-conditions you specified did not hold. "
            f"Condition that failed: {condition}"
        )
        super().__init__(412, "conditionNotMet", message)


class NotModifiedError(ApiError):
    def __init__(self) -> None:
        super().__init__(304, "notModified", "Not Modified")


class FolderInUseError(Exception):
    """Another process serves the folder."""


class ConnectionLostError(Exception):
    """The connection ends here, without an answer or in the middle of one."""
