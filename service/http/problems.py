"""Conversion of every error to a problem+json body, and the exception handlers."""

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy import exc as database_errors
from starlette.exceptions import HTTPException
from starlette.routing import Match

from cairn.service.errors import ProblemError
from cairn.service.http.field_errors import field_detail
from cairn.service.observability.ids import REQUEST_ID_HEADER, request_id
from cairn.service.problem_types import storage_problem
from cairn.service.schemas import MAX_ERRORS, MORE_ERRORS, FieldProblem, Problem
from cairn.service.sentences import detail_of, members_of
from cairn.storage import errors as storage_errors
from cairn.storage.errors import StorageError

logger = logging.getLogger(__name__)

MEDIA_TYPE: Final = "application/problem+json"
RETRY_AFTER: Final = "5"
"""Seconds after which a client may try again, as the header has it."""

# Messages of a full disk: SQLite's, the operating system's, PostgreSQL's.
_FULL: Final = ("disk is full", "No space left", "could not extend file")
_SHOWN: Final = 100  # characters of a sent value or field name
_MAX_LINES: Final = 100  # entries of a list other than `errors`, such as `problems`
_MAX_TEXT: Final = 8000  # characters of the detail, and of each such entry

_NO_DATABASE: Final = "The database does not answer"

_DATABASE: Final[Mapping[type[Exception], tuple[int, str, str]]] = {
    database_errors.SQLAlchemyError: (500, "database", "The database failed"),
    database_errors.OperationalError: (503, "database-unavailable", _NO_DATABASE),
    database_errors.InterfaceError: (503, "database-unavailable", _NO_DATABASE),
    database_errors.InternalError: (503, "database-unavailable", _NO_DATABASE),
    database_errors.DisconnectionError: (503, "database-unavailable", _NO_DATABASE),
    database_errors.TimeoutError: (503, "database-busy", "The database is busy"),
    database_errors.IntegrityError: (409, "conflict", "Another request did the same"),
}

_ALWAYS: Final = (401, 403, 422, 429, 431, 500, 503, 507)

_METHODS: Final = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")


def problem_from(exc: BaseException, *, instance: str, root: str = "") -> Problem:
    """Convert an error to a problem; for unknown errors it reveals nothing about the server.

    Args:
        exc: Error that was raised.
        instance: Path of the request or operation that failed.
        root: Name of the root that the request is about, if it names one.
    """
    if isinstance(exc, ProblemError):
        return _problem(
            exc.status,
            exc.slug,
            exc.title,
            exc.detail,
            instance,
            errors=exc.errors,
            **exc.extra,
        )
    if isinstance(exc, StorageError):
        members = members_of(exc, root=root)
        if isinstance(exc, storage_errors.LeaseHeldError):
            members["holder"] = exc.holder
        return _problem(*storage_problem(exc), detail_of(exc, root=root), instance, **members)
    for kind in type(exc).__mro__:
        if kind in _DATABASE:
            return _database_problem(exc, *_DATABASE[kind], instance)
    return _problem(
        500, "internal", "Internal error", "An unexpected error; the server's log has it.", instance
    )


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI declaration of a route's problems, and of those that all routes have."""
    return {
        status: {
            "description": HTTPStatus(status).phrase,
            "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted({*statuses, *_ALWAYS})
    }


def _respond(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    body = problem.model_dump(mode="json")
    named = dict(headers or {})
    if (request := request_id()) is not None:
        body["request_id"] = named[REQUEST_ID_HEADER] = request
    return JSONResponse(
        body,
        status_code=problem.status,
        headers=named,
        media_type=MEDIA_TYPE,
    )


def install_handlers(app: FastAPI) -> None:
    """Make `app` answer every error with a problem, FastAPI's own errors included."""
    app.add_exception_handler(StorageError, _on_error)
    app.add_exception_handler(ProblemError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(database_errors.SQLAlchemyError, _on_error)
    app.add_exception_handler(Exception, _on_error)


def answer(
    exc: Exception,
    *,
    method: str,
    path: str,
    root: str = "",
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Return the answer to a request that failed, and log the error if the server is at fault.

    Args:
        exc: Error that was raised.
        method: Method of the request.
        path: Path of the request.
        root: Name of the root that the request is about, if it names one.
        headers: Headers in addition to those of the error.
    """
    problem = problem_from(exc, instance=path, root=root)
    # The store is at fault, not the client.
    is_damage = isinstance(exc, storage_errors.CorruptionError)
    if problem.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        logger.error("%s %s failed", method, path, exc_info=exc)
    elif problem.status > HTTPStatus.INTERNAL_SERVER_ERROR or is_damage:
        logger.warning("%s %s: %s", method, path, problem.detail)
    own = {**(exc.headers if isinstance(exc, ProblemError) else {}), **(headers or {})}
    if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        own = {"Retry-After": RETRY_AFTER, **own}
    return _respond(problem, own)


async def _on_error(request: Request, exc: Exception) -> JSONResponse:
    root = request.path_params.get("root", "")
    return answer(exc, method=request.method, path=request.url.path, root=root)


async def _on_validation_error(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestValidationError)  # guaranteed by the registration
    more = sum(error["ctx"]["count"] for error in exc.errors() if error["type"] == MORE_ERRORS)
    invalid = [error for error in exc.errors() if error["type"] != MORE_ERRORS]
    errors = [
        {
            "field": ".".join(_clipped(str(part)) for part in error["loc"]),
            "detail": field_detail(error),
        }
        for error in invalid[:MAX_ERRORS]
    ]
    count = len(invalid) + more
    detail = "; ".join(f"{error['field']}: {error['detail']}" for error in errors)
    detail += f"; and {count - len(errors)} more" * (count > len(errors))
    kind: tuple[int, str, str] = (422, "invalid-request", "Invalid request")
    if any(error["type"] == "json_invalid" for error in invalid):
        kind = (400, "malformed", "Not JSON")
    return _respond(_problem(*kind, detail, request.url.path, errors=errors, error_count=count))


async def _on_http_exception(request: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, HTTPException)  # guaranteed by the registration
    phrase = HTTPStatus(exc.status_code).phrase
    detail = exc.detail
    if detail == phrase:
        request_line = f"{request.method} {request.url.path}"
        detail = f"{request_line}: {phrase}. /openapi.json lists what there is."
    slug = phrase.lower().replace(" ", "-").replace("'", "")
    headers = dict(exc.headers or {})
    if exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_allowed_methods(request))
    return _respond(_problem(exc.status_code, slug, phrase, detail, request.url.path), headers)


def _allowed_methods(request: Request) -> list[str]:
    """Return the methods of all routes of this path; Starlette lists only those of the first."""
    return [
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    ]


def _database_problem(
    exc: BaseException, status: int, slug: str, title: str, instance: str
) -> Problem:
    """Convert an error of a database to a problem; a full disk has a problem type of its own."""
    cause = str(getattr(exc, "orig", None) or "")
    if any(text in cause for text in _FULL):
        detail = "The server's database has no space left. Free space where it is "
        detail += "(CAIRN_DATA_DIR), then try again."
        return _problem(507, "database-full", "The database is full", detail, instance)
    causes = {
        503: "The server's database does not answer. Try again",
        409: "Another request has just written the same. Look, then try again",
    }
    cause = causes.get(status, "The server's database failed")
    detail = f"{cause}; the server's log has the cause."
    return _problem(status, slug, title, detail, instance)


def _clipped(text: str, most: int = _SHOWN) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _clipped_lines(value: Any) -> Any:
    """Shorten a member of a problem: the entries of a list, the characters of a text."""
    if isinstance(value, list):
        return [_clipped_lines(line) for line in value[:_MAX_LINES]]
    return _clipped(value, _MAX_TEXT) if isinstance(value, str) else value


def _problem(
    status: int,
    slug: str,
    title: str,
    detail: str,
    instance: str,
    *,
    errors: Sequence[Mapping[str, Any]] | None = None,
    error_count: int | None = None,
    **more: Any,
) -> Problem:
    """Build a problem of bounded size, whatever the client sent or the store has."""
    count = error_count or len(errors or ())
    members: dict[str, Any] = {name: _clipped_lines(value) for name, value in more.items()}
    return Problem(
        type=f"urn:cairn:problem:{slug}",
        title=title,
        status=status,
        detail=_clipped(detail, _MAX_TEXT),
        instance=instance,
        errors=None if errors is None else [FieldProblem(**error) for error in errors[:MAX_ERRORS]],
        error_count=count if count > MAX_ERRORS else None,
        **members,
    )
