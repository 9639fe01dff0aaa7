"""One connection of the double: requests in, faults applied, answers out."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from dataclasses import dataclass, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl, urlsplit

from tests.gcs.conditions import without_conditions
from tests.gcs.errors import ApiError, ConnectionLostError, NotFoundError
from tests.gcs.faults import Fault
from tests.gcs.routes import Match, find
from tests.gcs.service import Service
from tests.gcs.uploads import read_name
from tests.gcs.wire import Body, Request, Response

DRAIN_LIMIT_BYTES = 1 << 30
NO_BODY = (204, 304)
IN_FRONT_BYTES = 64 << 10


@dataclass(frozen=True)
class Served:
    """One line of the request log.

    Attributes:
        status: of the answer. A line with 0 says that the connection was cut; it follows the
            answer's own line if it was cut inside the answer.
        received: bytes of the request's body.
        answered: bytes of the answer's body.
        began: when it had been read, on the clock of `time.monotonic`.
        ended: when its answer was there.
    """

    method: str
    operation: str
    bucket: str
    name: str
    status: int
    received: int
    answered: int
    began: float = 0.0
    ended: float = 0.0


class Host(Protocol):
    """What a connection knows of its server."""

    service: Service
    root: Path

    def served(self, line: Served) -> None: ...

    def failed(self, trace: str) -> None: ...


class Handler(BaseHTTPRequestHandler):
    """Serves the requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    server_version = "gcs-double"
    disable_nagle_algorithm = True
    wbufsize = 64 << 10
    host: Host

    def do_GET(self) -> None:
        request, match = self._parse()
        self._began = time.monotonic()
        try:
            response, faults = self._answer(request, match)
            with response.file or contextlib.nullcontext():
                if not request.body.drain(DRAIN_LIMIT_BYTES):
                    self.close_connection = True
                self._log(request, response.status, response.length)
                self._send(response, faults)
        except (ConnectionLostError, OSError):
            self._log(request, 0, 0)
            self._cut()

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _log(self, request: Request, status: int, length: int) -> None:
        """Logs before the answer leaves, so that a client which has it finds it logged."""
        if request.operation != "admin":
            what = (request.method, request.operation, request.bucket, request.name)
            times = (self._began, time.monotonic())
            self.host.served(Served(*what, status, request.body.received, length, *times))

    def _head(self) -> tuple[str, dict[str, str], dict[str, str], int | None]:
        """Path, query, headers and length of the request; None: its body comes in chunks."""
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query, keep_blank_values=True))
        headers = {name.lower(): value for name, value in self.headers.items()}
        length: int | None = 0
        if "chunked" in headers.get("transfer-encoding", "").lower():
            length = None
        elif headers.get("content-length", "").isdecimal():
            length = int(headers["content-length"])
        return parts.path, query, headers, length

    def _parse(self) -> tuple[Request, Match | None]:
        path, query, headers, length = self._head()
        match = find(self.command, path, media=query.get("alt") == "media")
        parameters = match.parameters if match else {}
        address, port = self.connection.getsockname()[:2]
        request = Request(
            method=self.command,
            operation=match.operation if match else "unknown",
            bucket=parameters.get("bucket", ""),
            name=parameters.get("name") or query.get("name", ""),
            parameters=parameters,
            query=query,
            headers=headers,
            body=Body(self.rfile, self.connection, length),
            base_url=f"http://{headers.get('host', f'{address}:{port}')}",
        )
        return request, match

    def _answer(self, request: Request, match: Match | None) -> tuple[Response, list[Fault]]:
        """Carries the request out, faults first. Refusals become answers here.

        Raises:
            ConnectionLostError: if there is nobody to answer to.
        """
        faults: list[Fault] = []
        service = self.host.service
        try:
            if match is None:
                raise NotFoundError(f"Not Found: {request.method} {self.path}")
            if match.operation == "upload":
                read_name(request)
            if match.operation != "admin":
                faults = service.faults.take(request)
            for fault in faults:
                if fault.kind in ("slow", "hold"):
                    fault.pause()
                elif fault.kind == "hang":
                    fault.pause()
                    raise ConnectionLostError("never answered, by a fault")
                elif fault.kind == "status":
                    raise fault.error()
                elif fault.kind == "cut_upload":
                    request.body.cut_after = fault.nbytes
                elif fault.kind == "stale_list":
                    service = replace(service, store=fault.snapshot)
                elif fault.kind == "unconditional":
                    request = self._unconditional(request)
            response = match.handler(service, request)
        except ApiError as error:
            response = Response(status=304)
            if error.status not in NO_BODY:
                response = self._refusal(error, request)
        except ConnectionLostError:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and not self._bucket_exists(request):
                raise ConnectionLostError("the bucket was removed under the request") from error
            trace = traceback.format_exc()
            self.host.failed(f"{request.method} {self.path}\n{trace}")
            broken = ApiError(500, "internalError", f"the double itself failed: {trace}")
            response = self._refusal(broken, request)
        lost = [fault for fault in faults if fault.kind in ("lost_response", "mute")]
        if lost:
            if response.file is not None:
                response.file.close()
            for fault in lost:
                if fault.kind == "mute":
                    fault.pause()
            raise ConnectionLostError("the answer is lost by a fault")
        return response, faults

    def _unconditional(self, request: Request) -> Request:
        """The request as a server sees it that knows no preconditions."""
        return replace(request, query=without_conditions(request.query))

    def _refusal(self, error: ApiError, request: Request) -> Response:
        """The answer to a refused request."""
        return Response.json(error.body(), error.status)

    def _bucket_exists(self, request: Request) -> bool:
        return any(bucket.name == request.bucket for bucket in self.host.service.store.buckets())

    def _send(self, response: Response, faults: list[Fault]) -> None:
        """Sends an answer.

        Raises:
            ConnectionLostError: if a fault cuts it off.
        """
        length = promised = response.length
        cut = False
        stalled: list[Fault] = []
        for fault in faults:
            if fault.kind == "truncate":
                length = promised = min(length, fault.nbytes)
            elif fault.kind == "cut_download":
                length = min(length, fault.nbytes)
                cut = True
            elif fault.kind == "stall_download":
                length = min(length, fault.nbytes)
                stalled.append(fault)
        inside = self._inside(response) if not faults else None
        self.send_response(200 if inside else response.status)
        if inside:
            self.send_header("X-Accel-Redirect", inside)
            length = promised = 0
        for name, value in response.headers.items():
            self.send_header(name, value)
        if response.status not in NO_BODY:
            self.send_header("Content-Length", str(promised))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "HEAD" or response.status in NO_BODY:
            length = 0
        elif response.file is None:
            self.wfile.write(response.content[:length])
        self.wfile.flush()
        if response.file is not None and length:
            self._send_file(response.file.fileno(), response.offset, length)
        for fault in stalled:
            fault.pause()
        if cut or stalled:
            raise ConnectionLostError("cut by a fault")

    def _inside(self, response: Response) -> str | None:
        """Where the server in front, if there is one, finds the bytes, which it sends (`nginx.py`).

        Few are sent from here: they may be of an object that is replaced meanwhile. So is all of it
        where the range that was asked for is none: that one would refuse.
        """
        in_front = "X-Accel" in self.headers and self.command == "GET"
        if not in_front or response.file is None or response.length < IN_FRONT_BYTES:
            return None
        if "Range" in self.headers and response.status != HTTPStatus.PARTIAL_CONTENT:
            return None
        return f"/_stored/{Path(response.file.name).relative_to(self.host.root)}"

    def _send_file(self, file: int, offset: int, length: int) -> None:
        end = offset + length
        while offset < end:
            sent = os.sendfile(self.connection.fileno(), file, offset, end - offset)
            if sent == 0:
                raise ConnectionLostError("the stored file is shorter than its size")
            offset += sent

    def _cut(self) -> None:
        """Ends the connection at once, in both directions."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def handle_expect_100(self) -> bool:
        """Says `100 Continue` at once: the writer is buffered."""
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: the request log is `GcsServer.requests`."""
