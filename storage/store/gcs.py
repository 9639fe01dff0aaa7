"""Google Cloud Storage's JSON API, as far as listings need it; gcsfs carries the requests.

It goes past gcsfs's filesystem layer, which caches listings and asks more often than it must.
"""

import base64
import functools
import os
import threading
from collections.abc import Iterator
from email.utils import parsedate_to_datetime
from typing import Any

from cairn.storage.store import deadlines
from cairn.storage.store.files import asked, mapped
from cairn.storage.store.uri import StoreURI

__all__ = ["bucket_time", "crc32c_of", "filesystem", "limit_etils", "listed_pages"]

_CONNECT_SECONDS = 20.0
_connect_lock = threading.Lock()


def filesystem(uri: StoreURI) -> Any:
    """Gcsfs's file system for the bucket of `uri`, one per endpoint and process.

    Raises:
        StoreUnavailableError: no credentials, or no way to connect.
    """
    emulator = os.environ.get("STORAGE_EMULATOR_HOST") or None
    if emulator and "://" not in emulator:
        emulator = f"http://{emulator}"
    import aiohttp

    with _connect_lock, mapped(uri):
        connected = _connected(emulator.rstrip("/") if emulator else None)
    # gcsfs asks again after a silence of `sock_read`, and not once all time is spent.
    connected.requests_timeout = aiohttp.ClientTimeout(
        total=deadlines.DEADLINE_SECONDS, sock_connect=_CONNECT_SECONDS
    )
    return connected


@functools.cache
def _connected(emulator: str | None) -> Any:
    from gcsfs.core import GCSFileSystem

    credentials = {"token": "anon"} if emulator else {}  # else as fsspec is configured
    return GCSFileSystem(
        project=os.environ.get("GOOGLE_CLOUD_PROJECT", "none"),
        endpoint_url=emulator,
        use_listings_cache=False,
        **credentials,
    )


def limit_etils() -> None:
    """Have the requests end that Orbax makes by way of etils: those of its file system have no end.

    That a save does not wait for them is seen to elsewhere. This frees their threads, some time
    later: etils may also serve large files, of which nobody knows how long they take.
    """
    import aiohttp
    import fsspec

    shared = fsspec.filesystem("gcs", finalize_on_close=True)  # as etils asks for it: the very same
    if shared.requests_timeout is None:
        shared.requests_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=_CONNECT_SECONDS, sock_read=deadlines.DEADLINE_SECONDS
        )


def listed_pages(uri: StoreURI, prefix: str, **options: str) -> Iterator[dict[str, Any]]:
    """The pages of a listing: `items` of name, size, crc32c and generation, and `prefixes`.

    Args:
        uri: a folder in the bucket, for its name and the error.
        prefix: of the objects' whole names in the bucket.
        options: of the request, such as `delimiter`.

    Raises:
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    fields = "nextPageToken,prefixes,items(name,size,crc32c,generation)"
    query: dict[str, Any] = {"prefix": prefix or None, "fields": fields, **options}
    while True:
        fs = filesystem(uri)
        page = asked(
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
        yield page
        if not page.get("nextPageToken"):
            return
        query["pageToken"] = page["nextPageToken"]


def bucket_time(uri: StoreURI) -> float:
    """What the store says that the time is, in whole seconds since 1970.

    Raises:
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    fs = filesystem(uri)
    headers, _ = asked("stat", uri, fs.call, "GET", "b/{}/o", uri.bucket, maxResults=1)
    with mapped(uri):
        return parsedate_to_datetime(headers["Date"]).timestamp()


def crc32c_of(item: dict[str, Any]) -> str | None:
    """The crc32c that the store tells of an object: eight hexadecimal digits."""
    encoded = item.get("crc32c")
    return base64.b64decode(encoded).hex() if encoded else None
