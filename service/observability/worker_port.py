"""HTTP port of a worker, with its metrics and its health only."""

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import ClassVar, Final, TypeAlias

from cairn.service.errors import ServeError
from cairn.service.observability.metrics import CONTENT_TYPE, WorkerMetrics

logger = logging.getLogger(__name__)

Answers: TypeAlias = Mapping[str, Callable[[], tuple[bytes, str]]]
"""Functions by path that return a body and its media type."""

TIMEOUT_SECONDS: Final = 10.0
"""Time limit for a request that does not arrive completely."""


class WorkerPort:
    """Server of `/healthz` and `/metrics`, in daemon threads.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0: any free one.
        metrics: Metrics of the worker.
        version: Version of Cairn.

    Raises:
        ServeError: The address is in use.
    """

    def __init__(self, host: str, port: int, metrics: WorkerMetrics, *, version: str) -> None:
        health = json.dumps({"status": "ok", "version": version}).encode()
        answers: Answers = {
            "/healthz": lambda: (health, _JSON),
            "/metrics": lambda: (metrics.text(), CONTENT_TYPE),
        }

        class Handler(_Handler):
            known = answers

        try:
            self._server = _Server((host.removeprefix("[").removesuffix("]"), port), Handler)
        except OSError as exc:
            raise ServeError(
                f"CAIRN_WORKER_PORT: expected a free address to listen on, found {host}:{port}: "
                f"{exc.strerror}. Choose another port, or end what has it."
            ) from exc
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="cairn-worker-port", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the server, without waiting for requests under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_JSON: Final = "application/json"


class _Server(ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _Handler(BaseHTTPRequestHandler):
    known: ClassVar[Answers] = {}
    timeout = TIMEOUT_SECONDS
    server_version = "cairn"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer the paths of the worker's port, and any other path with 404."""
        answer = self.known.get(self.path.partition("?")[0])
        body, kind = (b"", "text/plain") if answer is None else answer()
        self.send_response(404 if answer is None else 200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, form: str, *args: object) -> None:
        """Log a request at debug level: one probe per second would fill the log."""
        logger.debug(form, *args)
