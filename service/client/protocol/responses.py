"""Conversion of problem answers, and of answers that are not from Cairn, into errors."""

import re
from typing import Any, Final, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from cairn.service.errors import ProblemResponseError, ServerUnreachableError

Body = TypeVar("Body", bound=BaseModel)
_THIS_MACHINE: Final = re.compile(r"\w+://(127(\.\d+){3}|localhost|\[::1\])(:\d+)?(/|\Z)")


def raise_for_problem(response: httpx.Response) -> None:
    """Raise the problem of an unsuccessful answer; the caller has read its body.

    Raises:
        ProblemResponseError: The answer is not a success.
    """
    if response.is_success:
        return
    problem: Any = None
    if response.headers.get("content-type", "").startswith("application/"):
        try:
            problem = response.json()
        except ValueError:
            problem = None
    if not isinstance(problem, dict):  # not from Cairn, but the page of a proxy, for example
        problem = {
            "type": "about:blank",
            "title": response.reason_phrase or "Unexpected answer",
            "status": response.status_code,
            "detail": f"expected a Cairn control plane, found: {response.text[:200]!r}",
            "instance": response.request.url.path,
        }
    seconds = response.headers.get("retry-after", "")
    raise ProblemResponseError(
        problem,
        response.status_code,
        retry_after=int(seconds) if seconds.isascii() and seconds.isdigit() else None,
    )


def read_body(kind: type[Body], response: httpx.Response) -> Body:
    """Parse the body of a success.

    Raises:
        ServerUnreachableError: The body has another form: the answer is not from Cairn's server.
    """
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as exc:
        media_type = response.headers.get("content-type", "no content type")
        raise ServerUnreachableError(
            f"{response.url}: expected {kind.__name__} from a Cairn control plane, found another "
            f"answer ({media_type}). Set CAIRN_URL to the address that `cairn serve` prints."
        ) from exc


def is_this_machine(url: str) -> bool:
    """Check that a URL leads to this machine, where `cairn serve` would answer it."""
    return _THIS_MACHINE.match(url) is not None


def unreachable(
    url: object, exc: httpx.TransportError | httpx.InvalidURL
) -> ServerUnreachableError:
    """Return the error for an answer that is missing or incomplete."""
    if isinstance(exc, httpx.ReadTimeout):
        return ServerUnreachableError(
            f"{url}: expected an answer of the control plane, found none in time: it is there, and "
            "it or its store is slow. Try again; `cairn doctor` looks for the cause."
        )
    cause = str(exc).rstrip(".") or type(exc).__name__
    advice = (
        "Start it with `cairn serve`, or set"
        if is_this_machine(str(url))
        else "See that it runs there, and check"
    )
    return ServerUnreachableError(
        f"{url}: expected an answer of the control plane, found: {cause}. {advice} CAIRN_URL."
    )
