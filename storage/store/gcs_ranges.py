"""Ranges of a bucket's objects, received straight into memory that the caller has.

TensorStore hands over bytes, which have been copied three times on their way, into pages that were
new each time. Here the kernel copies them to where they go. Only if all goes well: what is refused,
late or cut off is to be asked for through TensorStore, which tries again and knows when to end.
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
_SILENT_SECONDS: Final = 20.0
"""Without a byte: then TensorStore asks, with a deadline of its own."""

_MOST_FAILURES: Final = 8
"""Whatever they were: no more is asked for here."""


class RangeStream:
    """A range of an object on its way. To be closed."""

    def __init__(self, ranges: "GcsRanges", connection: Any, answer: Any) -> None:
        self._ranges, self._connection, self._answer = ranges, connection, answer

    def read_into(self, memory: memoryview) -> int:
        """Fill `memory` with the next bytes; how many there are, fewer if no more come."""
        filled = 0
        try:
            while filled < len(memory):
                count = self._answer.readinto(memory[filled:])
                if not count:
                    break
                filled += count
        except (OSError, http.client.HTTPException):
            self._ranges.failed()
        return filled

    def close(self) -> None:
        """Its connection serves another, if all of it has been read."""
        self._ranges.give_back(self._connection, whole=self._answer.isclosed())


class GcsRanges:
    """Asks for ranges of the objects below a folder. Safe for use by many threads; to be closed."""

    def __init__(self, folder: StoreURI) -> None:
        """Of a folder in a bucket."""
        self._folder = folder
        self._endpoint = urlsplit(os.environ.get("TENSORSTORE_GCS_HTTP_URL") or _ENDPOINT)
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._failures = _MOST_FAILURES if _proxy(self._endpoint) else 0

    def open(self, rel: str, start: int, stop: int) -> RangeStream | None:
        """Ask for bytes of an object; None if it has to be asked in another way.

        Args:
            rel: the object, from the folder.
            start: of the range.
            stop: of it; it is not empty.

        Raises:
            OSError: as None; this time it was tried.
            http.client.HTTPException: the same.
        """
        if self._failures >= _MOST_FAILURES:
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
            self.failed()
            if connection is not None:
                connection.close()
            raise
        return RangeStream(self, connection, answer)

    def failed(self) -> None:
        """One more did not come as it should."""
        self._failures += 1

    def give_back(self, connection: Any, *, whole: bool) -> None:
        """Have a connection serve another request, if its answer has been read as a whole."""
        if not whole:
            connection.close()
            return
        with self._lock:
            self._idle.append(connection)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _connection(self) -> Any:
        with contextlib.suppress(IndexError), self._lock:
            return self._idle.pop()
        limit = min(_SILENT_SECONDS, deadlines.DEADLINE_SECONDS / 4)
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
        except Exception as exc:  # of gcsfs or google.auth, which TensorStore does without
            raise http.client.HTTPException(f"no credentials: {exc}") from exc
        return headers


def _proxy(endpoint: Any) -> bool:
    """Whether the endpoint is asked through a proxy, which is left to TensorStore."""
    known = urllib.request.getproxies()
    return endpoint.scheme in known and not urllib.request.proxy_bypass(endpoint.hostname or "")


@functools.cache
def _trusted() -> ssl.SSLContext:
    """What TensorStore trusts."""
    bundle, folder = (
        os.environ.get(f"TENSORSTORE_CA_{kind}") or None for kind in ("BUNDLE", "PATH")
    )
    return ssl.create_default_context(cafile=bundle, capath=folder)
