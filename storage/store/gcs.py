"""The part of Google Cloud Storage's JSON API that listings need; gcsfs carries the requests.

It bypasses gcsfs's filesystem layer, which caches listings and makes more requests than needed.
"""

import base64
import functools
import os
import threading
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from cairn.storage.store import deadlines
from cairn.storage.store.files import request, translated_errors
from cairn.storage.store.listings import ListedObject, ListedPage
from cairn.storage.store.uri import StoreURI

__all__ = ["bucket_time", "crc32c_of", "filesystem", "list_pages", "set_etils_timeouts"]

_CONNECT_SECONDS = 20.0
_connect_lock = threading.Lock()


def filesystem(uri: StoreURI) -> Any:
    """Return gcsfs's file system for the bucket of `uri`, one per endpoint and process.

    Raises:
        StoreUnavailableError: there are no credentials, or the store can't be reached.
    """
    emulator = os.environ.get("STORAGE_EMULATOR_HOST") or None
    if emulator and "://" not in emulator:
        emulator = f"http://{emulator}"
    import aiohttp

    with _connect_lock, translated_errors(uri):
        connected = _connected(emulator.rstrip("/") if emulator else None)
    # gcsfs retries after a `sock_read` timeout, but not after a `total` one: set `total` only.
    connected.requests_timeout = aiohttp.ClientTimeout(
        total=deadlines.DEADLINE_SECONDS, sock_connect=_CONNECT_SECONDS
    )
    return connected


@functools.cache
def _connected(emulator: str | None) -> Any:
    from gcsfs.core import GCSFileSystem

    credentials = {"token": "anon"} if emulator else {}  # otherwise fsspec's configuration counts
    return GCSFileSystem(
        project=os.environ.get("GOOGLE_CLOUD_PROJECT", "none"),
        endpoint_url=emulator,
        use_listings_cache=False,
        **credentials,
    )


def set_etils_timeouts() -> None:
    """Set timeouts on the requests that Orbax makes through etils, whose file system has none.

    Saves have their own deadlines; this only ends blocked threads later. The timeouts limit the
    time without any answer, since etils may also read large files of unknown duration.
    """
    import aiohttp
    import fsspec

    shared = fsspec.filesystem("gcs", finalize_on_close=True)  # etils' own: fsspec caches them
    if shared.requests_timeout is None:
        shared.requests_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=deadlines.DEADLINE_SECONDS
        )


def list_pages(uri: StoreURI, prefix: str, delimiter: str) -> Iterator[ListedPage]:
    """Yield the pages of a listing; see `buckets.Bucket`.

    Raises:
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    fields = "nextPageToken,prefixes,items(name,size,crc32c,generation)"
    query: dict[str, Any] = {"prefix": prefix or None, "fields": fields}
    if delimiter:
        query["delimiter"] = delimiter
    while True:
        fs = filesystem(uri)
        page = request(
            "list",
            uri,
            fs.call,
            "GET",
            "b/{}/o",
            uri.bucket,
            json_out=True,
            maxResults=1000,
            **query,
        )
        yield ListedPage(
            [
                ListedObject(
                    item["name"], int(item["size"]), str(item["generation"]), crc32c_of(item)
                )
                for item in page.get("items", ())
                if not item["name"].endswith("/")
            ],
            [folder.rstrip("/") for folder in page.get("prefixes", ())],
        )
        if not page.get("nextPageToken"):
            return
        query["pageToken"] = page["nextPageToken"]


def bucket_time(uri: StoreURI) -> float:
    """Return the store's own time, in whole seconds since 1970.

    Raises:
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    fs = filesystem(uri)
    headers, _ = request("stat", uri, fs.call, "GET", "b/{}/o", uri.bucket, maxResults=1)
    with translated_errors(uri):
        return parsedate_to_datetime(headers["Date"]).timestamp()


def crc32c_of(item: dict[str, Any]) -> str | None:
    """Return the crc32c in an object's metadata as eight hexadecimal digits; None if absent."""
    encoded = item.get("crc32c")
    return base64.b64decode(encoded).hex() if encoded else None
