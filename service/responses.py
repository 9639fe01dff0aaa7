"""Answers of a control plane that are not what a client asked for, as errors."""

from typing import Any

import httpx

from service.errors import ProblemResponseError, ServerUnreachableError


def raise_for_problem(response: httpx.Response) -> None:
    """Nothing for a success.

    Raises:
        ProblemResponseError: The answer is a problem, or anything else but a success.
    """
    if response.is_success:
        return
    response.read()
    problem: Any = None
    if response.headers.get("content-type", "").startswith("application/"):
        try:
            problem = response.json()
        except ValueError:
            problem = None
    if not isinstance(problem, dict):  # not ours: a proxy's page, say
        problem = {
            "type": "about:blank",
            "title": response.reason_phrase or "Unexpected answer",
            "status": response.status_code,
            "detail": f"expected a Cairn control plane, found: {response.text[:200]!r}",
            "instance": response.request.url.path,
        }
    raise ProblemResponseError(problem, response.status_code)


def unreachable(url: object, exc: httpx.TransportError) -> ServerUnreachableError:
    """The error for an answer that did not come, or not whole."""
    return ServerUnreachableError(
        f"{url}: expected an answer of the control plane, found {str(exc) or type(exc).__name__}. "
        "Start it with `cairn serve`, or set CAIRN_URL."
    )
