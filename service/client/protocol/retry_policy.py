"""Retry policy: which requests are sent again, and after which pause.

The server answers 429 and not-ready before it does any work, so every such request is safe to
repeat. After other failures, only a read or a request with an `Idempotency-Key` is repeated.
"""

import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import httpx

_UNCHANGING: Final = frozenset({"GET", "HEAD"})
_NOTHING_DONE: Final = frozenset({"urn:cairn:problem:not-ready"})
_NEVER_SENT: Final = (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.LocalProtocolError)
_LONGEST: Final = 5.0  # seconds, unless the server's Retry-After is longer
_JITTER: Final = 0.25


def pause_after(
    response: httpx.Response, attempt: int, method: str, headers: Mapping[str, str] | None
) -> float | None:
    """Return the seconds until the retry after an answer; None for no retry.

    Args:
        response: The answer.
        attempt: Number of tries before this one.
        method: HTTP method of the request.
        headers: Headers of the request.
    """
    if response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return _retry_after(response, attempt)
    if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
        return None
    if _is_repeatable(method, headers):
        return _retry_after(response, attempt)
    try:
        body = response.json()
    except ValueError:
        return None
    is_nothing_done = isinstance(body, dict) and body.get("type") in _NOTHING_DONE
    return _retry_after(response, attempt) if is_nothing_done else None


def pause_after_break(
    error: httpx.TransportError, attempt: int, method: str, headers: Mapping[str, str] | None
) -> float | None:
    """Return the seconds until the retry after a broken connection; None for no retry.

    A connection that could not be opened, and a timeout, are not retried here.
    """
    if isinstance(error, (*_NEVER_SENT, httpx.TimeoutException)):
        return None
    return _pace(attempt) if _is_repeatable(method, headers) else None


def _is_repeatable(method: str, headers: Mapping[str, str] | None) -> bool:
    return method in _UNCHANGING or "Idempotency-Key" in (headers or {})


def _retry_after(response: httpx.Response, attempt: int) -> float:
    text = response.headers.get("retry-after", "")
    seconds = int(text) if text.isascii() and text.isdigit() else 0
    return max(float(seconds), _pace(attempt))


def _pace(attempt: int) -> float:
    """Return an exponential pause with jitter, so that many clients do not retry together."""
    return float(min(_LONGEST, 0.1 * 2**attempt)) * random.uniform(1 - _JITTER, 1 + _JITTER)
