# Made of asynchronous/connection.py by `python scripts/sync_client.py`: change that one.
"""Base of the HTTP client: the connection to one control plane."""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self, TypeVar

import httpx
from pydantic import BaseModel

from cairn.service.client.protocol.api_key import key_auth
from cairn.service.client.protocol.paths import DEFAULT_URL, step_path
from cairn.service.client.protocol.requests import Parameter, idempotency, without_none
from cairn.service.client.protocol.responses import raise_for_problem, read_body, unreachable
from cairn.service.client.protocol.retry_policy import pause_after, pause_after_break
from cairn.service.schemas import Operation

AT_ONCE: Final = 100
"""Most requests of one client at a time; more wait. Streams do not count, as they stay open."""

Body = TypeVar("Body", bound=BaseModel)


class Connection:
    """Connection to one control plane; safe to share between threads.

    Every method raises `ProblemResponseError` if the server answers with a problem, and
    `ServerUnreachableError` if it does not answer.

    Args:
        url: Address of the control plane; default: `CAIRN_URL`, else port 8321 here.
        key: API key to send; default: `CAIRN_KEY`, else the file `CAIRN_KEY_FILE`.
        timeout: Seconds to wait for an answer; it does not limit the length of a stream.
        retry_seconds: How long to retry a request that is safe to repeat, when the server is at
            its limit or a connection broke.
        transport: HTTP transport; for tests.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        key: str | None = None,
        timeout: float = 60.0,
        retry_seconds: float = 10.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._retry_seconds = retry_seconds
        self._turns = threading.Semaphore(AT_ONCE)
        self.url = (url or os.environ.get("CAIRN_URL") or DEFAULT_URL).rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                timeout=timeout,
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=AT_ONCE),
                transport=transport,
                trust_env=False,  # a proxy does not know this machine's loopback address
                headers={"Accept": "application/json"},
                auth=key_auth(key),
            )
        except httpx.InvalidURL as exc:
            raise unreachable(self.url, exc) from exc

    def __enter__(self) -> Self:
        """Use as `with Client() as client:`."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Close the connections."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def _start(
        self,
        verb: str,
        run: str,
        step: int,
        root: str,
        body: Mapping[str, object],
        idempotency_key: str | None,
    ) -> Operation:
        path = f"{step_path(root, run, step)}:{verb}"
        return self._send(Operation, "POST", path, body, headers=idempotency(idempotency_key))

    def _pages(
        self,
        kind: type[Body],
        path: str,
        /,
        *,
        timeout: httpx.Timeout | None = None,
        **parameters: Parameter,
    ) -> Iterator[Body]:
        token: str | None = None
        while True:
            page = self._get(kind, path, timeout=timeout, **parameters, page_token=token)
            yield page
            token = getattr(page, "next_page_token", None)
            if token is None:
                return

    def _get(
        self,
        kind: type[Body],
        path: str,
        /,
        *,
        timeout: httpx.Timeout | None = None,
        **parameters: Parameter,
    ) -> Body:
        more = {} if timeout is None else {"timeout": timeout}
        return read_body(kind, self._answer("GET", path, params=without_none(parameters), **more))

    def _send(
        self,
        kind: type[Body],
        method: str,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Body:
        return read_body(kind, self._answer(method, path, json=body, headers=headers))

    def _answer(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        headers, attempt = arguments.get("headers"), 0
        last = time.monotonic() + self._retry_seconds
        while True:
            try:
                with self._turns:
                    response = self._http.request(method, path, **arguments)
            except httpx.TransportError as exc:
                pause = pause_after_break(exc, attempt, method, headers)
                if pause is None or time.monotonic() + pause > last:
                    raise unreachable(self.url, exc) from exc
            else:
                pause = pause_after(response, attempt, method, headers)
                if pause is None or time.monotonic() + pause > last:
                    raise_for_problem(response)
                    return response
            time.sleep(pause)
            attempt += 1


def check(response: httpx.Response) -> None:
    """Raise the problem of an unsuccessful answer; leave the body of a success unread.

    Raises:
        ProblemResponseError: The answer is not a success.
    """
    if not response.is_success:
        response.read()
        raise_for_problem(response)
