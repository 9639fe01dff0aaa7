"""Connection to stores that speak S3, by botocore, and their listings.

Credentials come from botocore's chain alone: environment, profiles, web identity, container and
instance metadata. The endpoint is that of `s3_endpoint`, for TensorStore's requests too.
"""

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, Final

from cairn.storage.errors import StoreUnavailableError
from cairn.storage.store import deadlines
from cairn.storage.store.files import request, translated_errors
from cairn.storage.store.listings import ListedObject, ListedPage
from cairn.storage.store.requests import Operation
from cairn.storage.store.uri import StoreURI, s3_endpoint, s3_region

__all__ = [
    "bucket_settings",
    "bucket_time",
    "call",
    "check_installed",
    "credentials_text",
    "etag_of",
    "list_pages",
    "status_of",
]

_CONNECT_SECONDS: Final = 20.0
_ATTEMPTS: Final = 9
_RETRY_MODE: Final = "adaptive"
"""Once the store says SlowDown, all requests of this process become fewer."""

_CONNECTIONS: Final = 64
_connect_lock = threading.Lock()


@functools.cache
def check_installed() -> None:
    """Check that the extra `s3` is installed, before a request of TensorStore's, which needs none.

    Raises:
        StoreUnavailableError: botocore is not installed.
    """
    try:
        import botocore  # noqa: F401
    except ImportError as exc:
        raise StoreUnavailableError(
            "no way to speak to this store",
            expected="the package botocore",
            found=str(exc),
            next_step="Install it: pip install 'cairn-checkpoints[s3]'.",
        ) from exc


def call(operation: Operation, path: object, method: str, /, **parameters: Any) -> Any:
    """Make one request and return its answer.

    Args:
        operation: kind of request, for listeners.
        path: the object or folder, for errors.
        method: name of botocore's method, such as `head_object`.
        parameters: parameters of the request.

    Raises:
        NotFoundError: there is no such object, bucket or upload.
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    send: Callable[..., Any] = getattr(client(path), method)
    return request(operation, path, send, **parameters)


def client(path: object) -> Any:
    """Return botocore's client, one per endpoint and process.

    Raises:
        StoreUnavailableError: botocore is not installed, or can't begin.
    """
    check_installed()
    with _connect_lock, translated_errors(path):
        return _connected(s3_endpoint(), s3_region(), os.environ.get("AWS_PROFILE"))


@functools.lru_cache(maxsize=8)
def _connected(endpoint: str | None, region: str, profile: str | None) -> Any:
    from botocore.config import Config
    from botocore.session import Session

    config = Config(
        connect_timeout=_CONNECT_SECONDS,
        read_timeout=deadlines.DEADLINE_SECONDS,
        max_pool_connections=_CONNECTIONS,
        retries={"total_max_attempts": _ATTEMPTS, "mode": _RETRY_MODE},
        s3={"addressing_style": "path"} if endpoint else {},
        ignore_configured_endpoint_urls=True,  # TensorStore knows those of the environment alone
        # Other stores than AWS refuse the checksums that botocore adds of its own accord.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return Session(profile=profile).create_client(
        "s3", region_name=region, endpoint_url=endpoint, config=config
    )


def list_pages(uri: StoreURI, prefix: str, delimiter: str) -> Iterator[ListedPage]:
    """Yield the pages of a listing; see `buckets.Bucket`.

    Raises:
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    query: dict[str, Any] = {"Bucket": uri.bucket, "Prefix": prefix, "Delimiter": delimiter}
    while True:
        page = call("list", uri, "list_objects_v2", **query)
        yield ListedPage(
            [
                ListedObject(item["Key"], int(item["Size"]), etag_of(item), None)
                for item in page.get("Contents", ())
                if not item["Key"].endswith("/")
            ],
            [folder["Prefix"].rstrip("/") for folder in page.get("CommonPrefixes", ())],
        )
        if not page.get("IsTruncated"):
            return
        query["ContinuationToken"] = page["NextContinuationToken"]


def etag_of(answer: Mapping[str, Any]) -> str:
    """Return the ETag in an answer, in quotes: some stores list it without."""
    return f'"{str(answer["ETag"]).strip(chr(34))}"'


def status_of(error: BaseException | None) -> int | None:
    """Return the HTTP status in an error of botocore; None if there was no answer."""
    answer = getattr(error, "response", None) or {}
    status: int | None = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status


def credentials_text(path: object) -> str | None:
    """Return where the credentials are from, and the end of the key's id; None if there are none.

    Raises:
        StoreUnavailableError: botocore is not installed, or can't begin.
    """
    check_installed()
    from botocore.session import Session

    with translated_errors(path):
        credentials = Session(profile=os.environ.get("AWS_PROFILE")).get_credentials()
        if credentials is None:
            return None
        frozen = credentials.get_frozen_credentials()
        return f"{credentials.method}, key ...{str(frozen.access_key)[-4:]}"


_SETTINGS: Final = {
    "versioning": "get_bucket_versioning",
    "object_lock": "get_object_lock_configuration",
    "lifecycle": "get_bucket_lifecycle_configuration",
}


def bucket_settings(uri: StoreURI, name: str) -> dict[str, Any]:
    """Return a bucket's `versioning`, `object_lock` or `lifecycle`, as botocore does.

    Raises:
        NotFoundError: the bucket has none.
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    answer: dict[str, Any] = call("stat", uri, _SETTINGS[name], Bucket=uri.bucket)
    return {key: value for key, value in answer.items() if key != "ResponseMetadata"}


def bucket_time(uri: StoreURI) -> float:
    """Return the store's own time, in whole seconds since 1970.

    Raises:
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    prefix = f"{uri.path}/" if uri.path else ""
    answer = call("stat", uri, "list_objects_v2", Bucket=uri.bucket, Prefix=prefix, MaxKeys=1)
    with translated_errors(uri):
        headers = answer["ResponseMetadata"]["HTTPHeaders"]
        return parsedate_to_datetime(headers["date"]).timestamp()
