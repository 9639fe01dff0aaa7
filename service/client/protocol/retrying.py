"""Which requests are sent again, and when: only what can have changed nothing, or is asked once.

A caller that asks too often, or gets no turn, is told so before anything is done. All else is sent
again only if it changes nothing, or has an `Idempotency-Key`.
"""

import random
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

import httpx

_UNCHANGING: Final = frozenset({"GET", "HEAD"})
_NOTHING_DONE: Final = frozenset({"urn:cairn:problem:not-ready"})
_NEVER_SENT: Final = (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.LocalProtocolError)
_LONGEST: Final = 5.0  # seconds, of what the client chooses itself
_JITTER: Final = 0.25


def pause_after(
    response: httpx.Response, attempt: int, method: str, headers: Mapping[str, str] | None
) -> float | None:
    """Seconds until a request is sent again whose answer this is; None: it stays as it is.

    Args:
        response: The answer.
        attempt: How many were sent before it.
        method: Of the request.
        headers: Of the request.
    """
    if response.status_code == HTTPStatus.TOO_MANY_REQUESTS:
        return _told(response, attempt)
    if response.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
        return None
    if _is_repeatable(method, headers) or _kind(response) in _NOTHING_DONE:
        return _told(response, attempt)
    return None


def pause_after_break(
    error: httpx.TransportError, attempt: int, method: str, headers: Mapping[str, str] | None
) -> float | None:
    """The same, of a request without an answer. One that nobody can hear is not sent again."""
    if isinstance(error, (*_NEVER_SENT, httpx.TimeoutException)):
        return None
    return _pace(attempt) if _is_repeatable(method, headers) else None


def _is_repeatable(method: str, headers: Mapping[str, str] | None) -> bool:
    return method in _UNCHANGING or "Idempotency-Key" in (headers or {})


def _kind(response: httpx.Response) -> object:
    try:
        body = response.json()
    except ValueError:
        return None
    return body.get("type") if isinstance(body, dict) else None


def _told(response: httpx.Response, attempt: int) -> float:
    text = response.headers.get("retry-after", "")
    told = int(text) if text.isascii() and text.isdigit() else 0
    return max(float(told), _pace(attempt))


def _pace(attempt: int) -> float:
    """Longer each time, and another for each of many clients."""
    return float(min(_LONGEST, 0.1 * 2**attempt)) * random.uniform(1 - _JITTER, 1 + _JITTER)
