"""Server-sent events, read: one operation followed to its end over connections that may break."""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

import httpx

from cairn.service.client.responses import raise_for_problem, unreachable
from cairn.service.errors import ProblemResponseError
from cairn.service.schemas import Operation

FIRST_DELAY_SECONDS: Final = 0.1
LONGEST_DELAY_SECONDS: Final = 2.0
# Longer than the pause between two keep-alive comments of the server.
SILENCE_SECONDS: Final = 60.0
_TRANSIENT: Final = frozenset(
    {HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
)


@dataclass(frozen=True)
class Event:
    """One event, with its id if it has one."""

    data: str
    id: str | None
    retry_seconds: float | None = None


def parse_events(chunks: Iterable[bytes]) -> Iterator[Event]:
    """The events in a `text/event-stream` body.

    Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream".
    """
    data: list[str] = []
    event_id: str | None = None
    retry: float | None = None
    for line in _lines(chunks):
        if not line:
            if data:
                yield Event("\n".join(data), event_id, retry)
            data, event_id = [], None
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "id" and "\0" not in value:
            event_id = value
        elif field == "retry" and value.isascii() and value.isdigit():
            retry = int(value) / 1000


def _lines(chunks: Iterable[bytes]) -> Iterator[str]:
    r"""Lines ended by \r\n, \n or \r only; str.splitlines() would also split at U+2028."""
    rest = b""
    after_return = False
    first = True
    for chunk in chunks:
        if after_return and chunk:
            chunk = chunk.removeprefix(b"\n")  # the other half of \r\n
            after_return = False
        rest += chunk
        if not rest:
            continue
        after_return = rest.endswith(b"\r")
        *complete, rest = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for line in complete:
            text = line.decode("utf-8", "replace")
            yield text.removeprefix("\ufeff") if first else text
            first = False


def follow_operation(
    http: httpx.Client,
    path: str,
    *,
    patience: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Operation]:
    """Every state that the stream at `path` reports, up to the final one.

    Args:
        http: Client of the server.
        path: The operation's events.
        patience: Seconds without any answer after which the server counts as gone.
        clock: Monotonic seconds.
        sleep: Waits that many seconds before the next try.

    Raises:
        ProblemResponseError: The server refused.
        ServerUnreachableError: No answer for `patience` seconds.
    """
    last_id: str | None = None
    delay = FIRST_DELAY_SECONDS
    failing_since: float | None = None
    while True:
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        try:
            timeout = httpx.Timeout(patience, read=SILENCE_SECONDS)
            with http.stream("GET", path, headers=headers, timeout=timeout) as response:
                raise_for_problem(response)
                failing_since = None
                if response.status_code == HTTPStatus.NO_CONTENT:
                    return  # the server has nothing more to say
                for event in parse_events(response.iter_bytes()):
                    delay = event.retry_seconds or FIRST_DELAY_SECONDS
                    if event.id is not None:
                        if event.id == last_id:
                            continue  # told again after a reconnect
                        last_id = event.id
                    operation = Operation.model_validate_json(event.data)
                    yield operation
                    if operation.state.final:
                        return
        except (httpx.TransportError, ProblemResponseError) as exc:
            if isinstance(exc, ProblemResponseError) and exc.status not in _TRANSIENT:
                raise
            failing_since = clock() if failing_since is None else failing_since
            if clock() - failing_since >= patience:
                if isinstance(exc, ProblemResponseError):
                    raise
                raise unreachable(f"{http.base_url}{path}", exc) from exc
        sleep(delay)
        delay = min(2 * delay, LONGEST_DELAY_SECONDS)
