"""Which request and which job a line of the log, a span or a problem belongs to."""

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
    """Of the request that is being answered, or that a job was started by."""
    return _request.get()


def operation_id() -> str | None:
    """Of the job that this thread runs."""
    return _operation.get()


def begin_request(asked: str | None) -> str:
    """The id of a request that begins: the caller's own if it is plain, else a new one.

    It holds for the rest of the context, which a request has for itself: an error is answered
    after all else has ended.
    """
    identity = asked if asked and _VALID.fullmatch(asked) else secrets.token_hex(16)
    _request.set(identity)
    return identity


@contextmanager
def job_of(operation: str, request: str | None) -> Iterator[None]:
    """This thread runs a job meanwhile.

    Args:
        operation: Its id.
        request: Id of the request that started it.
    """
    tokens = _operation.set(operation), _request.set(request)
    try:
        yield
    finally:
        _operation.reset(tokens[0])
        _request.reset(tokens[1])
