"""What the HTTP client is made of: one connection to a control plane, and its paths."""

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from cairn.service.client.own_key import authorization
from cairn.service.client.responses import raise_for_problem, read_body, unreachable
from cairn.service.client.retrying import pause_after, pause_after_break
from cairn.service.schemas import Operation

DEFAULT_URL: Final = "http://127.0.0.1:8321"
DEFAULT_ROOT: Final = "default"

Body = TypeVar("Body", bound=BaseModel)
Parameter = str | int | float | bool | None


class Connection:
    """Asks one control plane; safe to share between threads.

    Every method raises `ProblemResponseError` for a problem answer and `ServerUnreachableError`
    if there is none.

    Args:
        url: Address of the control plane; default: `CAIRN_URL`, else port 8321 here.
        key: With which it is asked; default: `CAIRN_KEY`, else the file `CAIRN_KEY_FILE`.
        timeout: Seconds to wait for an answer, not for a stream to end.
        retry_seconds: How long a request is sent again that can be: the server has no turn for
            it, or a connection broke; see `retrying`.
        transport: For tests.
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
        self.url = (url or os.environ.get("CAIRN_URL") or DEFAULT_URL).rstrip("/")
        try:
            self._http = httpx.Client(
                base_url=self.url,
                timeout=timeout,
                transport=transport,
                trust_env=False,  # a proxy does not know this machine's loopback address
                headers={"Accept": "application/json", **authorization(key)},
            )
        except httpx.InvalidURL as exc:
            raise unreachable(self.url, exc) from exc

    def __enter__(self) -> Self:
        """Use as `with Client() as cairn:`."""
        return self

    def __exit__(self, *failure: object) -> None:
        """Close."""
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
        return read_body(kind, self._answer("GET", path, params=given(parameters), **more))

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


def idempotency(key: str | None) -> dict[str, str]:
    """The header of a request that may be sent again."""
    return {} if key is None else {"Idempotency-Key": key}


def given(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Those parameters that say something."""
    return {name: value for name, value in parameters.items() if value is not None}


def segment(text: str) -> str:
    """One segment of a path, whatever the text is; "." and ".." would lead to another path."""
    return "%2E" * len(text) if text in (".", "..") else quote(text, safe="")


def run_path(root: str, run: str) -> str:
    """The path of a run."""
    return f"/v1/roots/{segment(root)}/runs/{segment(run)}"


def step_path(root: str, run: str, step: int) -> str:
    """The path of a checkpoint."""
    return f"{run_path(root, run)}/checkpoints/{step}"


def alias_path(root: str, run: str, alias: str) -> str:
    """The path of an alias."""
    return f"{run_path(root, run)}/aliases/{segment(alias)}"
