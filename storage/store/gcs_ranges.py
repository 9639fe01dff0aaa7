"""Range reads of a bucket's objects, straight into the caller's memory.

TensorStore returns bytes that were copied three times, into newly allocated pages each time. Here
the kernel copies them to their destination once. This is the fast path only: after an error, a
timeout or a short answer the caller reads through TensorStore, which retries and has a deadline.
See ADR 46.
"""

import contextlib
import functools
import http.client
import os
import ssl
import threading
import urllib.request
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote, urlsplit

from cairn.storage.store import deadlines
from cairn.storage.store.gcs import filesystem
from cairn.storage.store.uri import StoreURI

__all__ = ["GcsRanges", "RangeStream"]

_ENDPOINT: Final = "https://storage.googleapis.com"
_TIMEOUT_SECONDS: Final = 20.0
"""Socket timeout; after it the caller falls back to TensorStore, which has its own deadline."""

_MAX_FAILURES: Final = 8
"""Number of failures after which this path is not used any more."""


class RangeStream:
    """Response with a range of an object. The caller closes it."""

    def __init__(self, ranges: "GcsRanges", connection: Any, answer: Any) -> None:
        self._ranges, self._connection, self._answer = ranges, connection, answer

    def read_into(self, memory: memoryview) -> int:
        """Fill `memory` with the next bytes; return their number, fewer at the end."""
        filled = 0
        try:
            while filled < len(memory):
                count = self._answer.readinto(memory[filled:])
                if not count:
                    break
                filled += count
        except (OSError, http.client.HTTPException):
            self._ranges.count_failure()
        return filled

    def close(self) -> None:
        """Reuse the connection if the answer was read completely; close it otherwise."""
        self._ranges.put_back(self._connection, whole=self._answer.isclosed())


class GcsRanges:
    """Range requests for the objects below a folder. Thread-safe. The caller closes it."""

    def __init__(self, folder: StoreURI) -> None:
        """Prepare requests for objects below `folder`, in a bucket."""
        self._folder = folder
        self._endpoint = urlsplit(os.environ.get("TENSORSTORE_GCS_HTTP_URL") or _ENDPOINT)
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        proxies, host = urllib.request.getproxies(), self._endpoint.hostname or ""
        # Only TensorStore supports a proxy.
        has_proxy = self._endpoint.scheme in proxies and not urllib.request.proxy_bypass(host)
        self._failures = _MAX_FAILURES if has_proxy else 0

    def open(self, rel: str, start: int, stop: int) -> RangeStream | None:
        """Request bytes of an object; return None if the caller must use TensorStore.

        Args:
            rel: the object, relative to the folder.
            start: start of the range.
            stop: end of the range, which is not empty.

        Raises:
            OSError: the request failed; use TensorStore for this range.
            http.client.HTTPException: likewise.
        """
        if self._failures >= _MAX_FAILURES:
            return None
        name = quote((self._folder / rel).path, safe="")
        path = f"/storage/v1/b/{quote(self._folder.bucket, safe='')}/o/{name}?alt=media"
        connection = None
        try:
            headers = {"Range": f"bytes={start}-{stop - 1}", **self._credentials()}
            connection = self._connection()
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            if answer.status != HTTPStatus.PARTIAL_CONTENT or answer.length != stop - start:
                raise http.client.HTTPException(f"{answer.status}, {answer.length} bytes")
        except BaseException:
            self.count_failure()
            if connection is not None:
                connection.close()
            raise
        return RangeStream(self, connection, answer)

    def count_failure(self) -> None:
        """Count a failure; after `_MAX_FAILURES`, `open` returns None."""
        self._failures += 1

    def put_back(self, connection: Any, *, whole: bool) -> None:
        """Keep a connection for the next request if its answer was read; else close it."""
        if not whole:
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the idle connections."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self) -> Any:
        with contextlib.suppress(IndexError), self._lock:
            return self._idle.pop()
        limit = min(_TIMEOUT_SECONDS, deadlines.DEADLINE_SECONDS / 4)
        host, port = self._endpoint.hostname or "", self._endpoint.port
        if self._endpoint.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=limit, context=_trusted())
        return http.client.HTTPConnection(host, port, timeout=limit)

    def _credentials(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        try:
            credentials = filesystem(self._folder).credentials
            credentials.maybe_refresh()
            credentials.apply(headers)
        except Exception as exc:  # from gcsfs or google.auth; TensorStore needs neither
            raise http.client.HTTPException(f"no credentials: {exc}") from exc
        return headers


@functools.cache
def _trusted() -> ssl.SSLContext:
    """Return an SSL context with the certificates that TensorStore trusts."""
    bundle, folder = (
        os.environ.get(f"TENSORSTORE_CA_{kind}") or None for kind in ("BUNDLE", "PATH")
    )
    return ssl.create_default_context(cafile=bundle, capath=folder)
