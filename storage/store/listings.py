"""Listings of buckets, in one form for every kind of store."""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ListedObject", "ListedPage"]


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
