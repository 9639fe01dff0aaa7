"""Ids of the current request and job, for log lines, spans and problems."""

import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

REQUEST_ID_HEADER: Final = "X-Request-ID"
_VALID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")

_request: ContextVar[str | None] = ContextVar("cairn_request_id", default=None)
_operation: ContextVar[str | None] = ContextVar("cairn_operation_id", default=None)


def request_id() -> str | None:
    """Return the id of the current request, or of the one that started the current job, or None."""
    return _request.get()


def operation_id() -> str | None:
    """Return the id of the job that this thread runs, or None."""
    return _operation.get()


def begin_request(client_id: str | None) -> str:
    """Set and return the id of a new request: the client's own if it is plain, else a new one.

    The id stays for the rest of the request's context, since some errors are answered after all
    other blocks have ended.

    Args:
        client_id: Id that the client sent; None: it sent none.
    """
    identity = client_id if client_id and _VALID.fullmatch(client_id) else secrets.token_hex(16)
    _request.set(identity)
    return identity


@contextmanager
def job_of(operation: str, request: str | None) -> Iterator[None]:
    """Set the ids of the job that this thread runs, and reset them at the end.

    Args:
        operation: Id of the job.
        request: Id of the request that started it.
    """
    tokens = _operation.set(operation), _request.set(request)
    try:
        yield
    finally:
        _operation.reset(tokens[0])
        _request.reset(tokens[1])
