"""Refusals in the XML of S3, and the code that S3 has for each status."""

from __future__ import annotations

from xml.sax.saxutils import escape

from tests.gcs.errors import ApiError
from tests.gcs.wire import Response

CODES = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    408: "RequestTimeout",
    409: "ConditionalRequestConflict",
    411: "MissingContentLength",
    412: "PreconditionFailed",
    416: "InvalidRange",
    429: "TooManyRequests",
    500: "InternalError",
    501: "NotImplemented",
    503: "SlowDown",
    507: "InsufficientCapacity",
}


class S3Error(ApiError):
    """A refusal with a code of S3's own."""

    def __init__(self, status: int, code: str, message: str = "") -> None:
        super().__init__(status, code, message or code)


class PreconditionFailedError(S3Error):
    def __init__(self, header: str) -> None:
        super().__init__(412, "PreconditionFailed", f"{header} did not hold")


def refusal(error: ApiError, resource: str) -> Response:
    """Return the answer to a refused request."""
    code = error.reason if isinstance(error, S3Error) else CODES.get(error.status, error.reason)
    if error.status == 404 and "bucket" in error.message:
        code = "NoSuchBucket"
    text = (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        f"<Error><Code>{code}</Code><Message>{escape(error.message)}</Message>"
        f"<Resource>{escape(resource)}</Resource><RequestId>double</RequestId></Error>"
    )
    headers = {"Content-Type": "application/xml"}
    return Response(error.status, headers, content=text.encode())
