"""Listings of buckets, in one form for every kind of store."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from cairn.storage.store import gcs, s3
from cairn.storage.store.uri import StoreURI

__all__ = ["ListedObject", "ListedPage", "list_pages"]


class ListedObject(NamedTuple):
    """Object in a listing.

    Attributes:
        name: full name in the bucket.
        size: size in bytes.
        stamp: text that changes whenever the object does.
        crc32c: crc32c of the bytes, eight hexadecimal digits; None if the store does not list it.
    """

    name: str
    size: int
    stamp: str
    crc32c: str | None


class ListedPage(NamedTuple):
    """Page of a listing.

    Attributes:
        objects: the objects, without those that stand for folders.
        folders: full names of the folders at the delimiter, without "/" at the end.
    """

    objects: Sequence[ListedObject]
    folders: Sequence[str]


def list_pages(uri: StoreURI, prefix: str, *, delimiter: str = "") -> Iterator[ListedPage]:
    """Yield the pages of a listing.

    Args:
        uri: a folder in the bucket, for the bucket's name and for errors.
        prefix: prefix of the objects' full names in the bucket.
        delimiter: "/" lists one folder alone; "" all below it.

    Raises:
        StoreUnavailableError: the store gives no answer, or refuses.
    """
    if uri.scheme == "s3":
        yield from map(_page_of_s3, s3.list_pages(uri, prefix, delimiter))
        return
    for page in gcs.list_pages(uri, prefix, **({"delimiter": delimiter} if delimiter else {})):
        yield _page_of_gcs(page)


def _page_of_gcs(page: dict[str, Any]) -> ListedPage:
    return ListedPage(
        [
            ListedObject(
                item["name"], int(item["size"]), str(item["generation"]), gcs.crc32c_of(item)
            )
            for item in page.get("items", ())
            if not item["name"].endswith("/")
        ],
        [folder.rstrip("/") for folder in page.get("prefixes", ())],
    )


def _page_of_s3(page: dict[str, Any]) -> ListedPage:
    return ListedPage(
        [
            ListedObject(item["Key"], int(item["Size"]), str(item["ETag"]), None)
            for item in page.get("Contents", ())
            if not item["Key"].endswith("/")
        ],
        [folder["Prefix"].rstrip("/") for folder in page.get("CommonPrefixes", ())],
    )
