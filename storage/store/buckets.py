"""What a driver of a kind of bucket offers beside its `Files`; the choice of the driver."""

from collections.abc import Iterator
from typing import Final, Protocol

from cairn.storage.store import gcs, s3
from cairn.storage.store.listings import ListedPage
from cairn.storage.store.uri import StoreURI

__all__ = ["Bucket", "bucket_driver"]


class Bucket(Protocol):
    """Driver of a kind of bucket. Both functions raise `StoreUnavailableError`."""

    def list_pages(self, uri: StoreURI, prefix: str, delimiter: str) -> Iterator[ListedPage]:
        """Yield the pages of a listing.

        Args:
            uri: a folder in the bucket, for the bucket's name and for errors.
            prefix: prefix of the objects' full names in the bucket.
            delimiter: "/" lists one folder alone; "" all below it.
        """

    def bucket_time(self, uri: StoreURI) -> float:
        """Return the store's own time, in whole seconds since 1970."""


_DRIVERS: Final[dict[str, Bucket]] = {"gs": gcs, "s3": s3}


def bucket_driver(uri: StoreURI) -> Bucket:
    """Return the driver of a bucket's scheme."""
    return _DRIVERS[uri.scheme]
