"""The double as a server: a listening socket, one thread per connection, a clean end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from pathlib import Path
from types import TracebackType

from tests.gcs.faults import Faults
from tests.gcs.handler import Handler, Served
from tests.gcs.listing import Snapshot
from tests.gcs.service import Service
from tests.gcs.store import Store

REQUEST_LOG_LENGTH = 20_000
BACKLOG = 512


def bind(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A bound socket that refuses connections until a server listens on it.

    So the environment can name the port before any client library is imported.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def client_environment(url: str) -> dict[str, str]:
    """The variables that send TensorStore, gcsfs, etils and Google's client to a double.

    Args:
        url: "http://host:port".
    """
    return {
        "TENSORSTORE_GCS_HTTP_URL": url,
        "STORAGE_EMULATOR_HOST": url,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "GOOGLE_CLOUD_PROJECT": "test",
        "FSSPEC_GCS_TOKEN": "anon",
        "NO_GCE_CHECK": "true",
    }


class GcsServer:
    """A double of Google Cloud Storage on a loopback port; a context manager.

    Args:
        root: folder of the store; made if missing, continued if there.
        listener: a bound socket, which the server closes at its end; by default a free port.

    Attributes:
        service: store, faults and sessions.
        requests: what has been served, oldest first.
        failures: tracebacks of errors in the double itself; empty unless it has a bug.
    """

    def __init__(self, root: Path, listener: socket.socket | None = None) -> None:
        self.root = root
        faults = Faults()
        store = Store(root, faults.admit)
        faults.snapshot = lambda: Snapshot(store.buckets())
        self.service = Service(store=store, faults=faults)
        self.requests: deque[Served] = deque(maxlen=REQUEST_LOG_LENGTH)
        self.failures: list[str] = []
        self._listener = listener if listener is not None else bind()
        self.host, self.port = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._acceptor = threading.Thread(target=self._accept, name="gcs-accept", daemon=True)
        self._closed = False

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def store(self) -> Store:
        return self.service.store

    @property
    def faults(self) -> Faults:
        return self.service.faults

    def start(self) -> GcsServer:
        """Begins to serve."""
        self._listener.listen(BACKLOG)
        self._acceptor.start()
        return self

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(
                target=self._serve, args=(connection, address), name="gcs-connection", daemon=True
            )
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                self._connections[thread] = connection
            thread.start()

    def _serve(self, connection: socket.socket, address: tuple[str, int]) -> None:
        try:
            with connection, contextlib.suppress(ConnectionError):
                self._connect(connection, address)
        finally:
            with self._lock:
                self._connections.pop(threading.current_thread(), None)

    def _connect(self, connection: socket.socket, address: tuple[str, int]) -> None:
        """Serves the requests of one connection until it ends."""
        _Connection(connection, address, self)

    def served(self, line: Served) -> None:
        """Adds to the request log."""
        self.requests.append(line)
        with self._lock:
            self.service.received_bytes += line.received

    def failed(self, trace: str) -> None:
        """Remembers an error of the double itself."""
        self.failures.append(trace)

    def close(self) -> None:
        """Ends all connections and frees the port; the store's folder stays. May be repeated."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections.items())
        self.faults.clear()
        # A shutdown wakes accept() and recv() up; closing alone would leave them waiting.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for _, connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._acceptor.ident is not None:
            self._acceptor.join()
        for thread, _ in connections:
            thread.join()
        self.service.sessions.close()
        self.store.close()

    def __enter__(self) -> GcsServer:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Connection(Handler):
    """A handler that knows its server by the narrow face it needs."""

    def __init__(
        self, connection: socket.socket, address: tuple[str, int], host: GcsServer
    ) -> None:
        self.host = host
        super().__init__(connection, address, host)  # type: ignore[arg-type]  # any object will do
