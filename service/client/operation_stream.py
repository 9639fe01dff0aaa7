# Made of asynchronous/operation_stream.py by `python scripts/sync_client.py`: change that one.
"""Event stream of one operation, followed to its end across broken connections."""

import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Final

import httpx

from cairn.service.client.connection import check
from cairn.service.client.protocol.backoff import Backoff
from cairn.service.client.protocol.event_stream import EventStream
from cairn.service.client.protocol.responses import unreachable
from cairn.service.errors import ProblemResponseError
from cairn.service.schemas import Operation

# Longer than the pause between two keep-alive comments of the server.
SILENCE_SECONDS: Final = 60.0


def follow_operation(http: httpx.Client, path: str, patience: Backoff) -> Iterator[Operation]:
    """Yield every state that the stream at `path` reports, up to the final one.

    Args:
        http: Client of the server.
        path: Path of the operation's events.
        patience: Time limit and backoff while the server does not answer.

    Raises:
        ProblemResponseError: The server refused.
        ServerUnreachableError: There was no answer for too long.
    """
    last_id: str | None = None
    timeout = httpx.Timeout(patience.seconds, read=SILENCE_SECONDS)
    while True:
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        if last_id is not None:
            headers["Last-Event-ID"] = last_id
        try:
            with http.stream("GET", path, headers=headers, timeout=timeout) as response:
                check(response)
                patience.answered()
                if response.status_code == HTTPStatus.NO_CONTENT:
                    return  # the client has the final state already
                stream = EventStream()
                for chunk in response.iter_bytes():
                    for event in stream.read(chunk):
                        patience.begin_again(event.retry_seconds)
                        if event.id is not None:
                            if event.id == last_id:
                                continue  # sent again after a reconnect
                            last_id = event.id
                        operation = Operation.model_validate_json(event.data)
                        yield operation
                        if operation.state.final:
                            return
        except httpx.TransportError as exc:
            if patience.failed(exc):
                raise unreachable(f"{http.base_url}{path}", exc) from exc
        except ProblemResponseError as exc:
            if patience.failed(exc):
                raise
        time.sleep(patience.pause())
