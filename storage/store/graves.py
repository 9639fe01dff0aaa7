"""Graves: what a bucket has in place of a record that was deleted under a condition.

Most stores that speak S3 can write under a condition, and can't delete under one. So such a
deletion is a conditional write of one fixed text, which every reader takes for nothing. A grave can
be written over, under a condition, as any object; it goes for good together with what its name
belongs to, once that name is never written again. See ADR 58.
"""

import hashlib
from typing import Final

import google_crc32c

from cairn.storage.store.listings import ListedObject

__all__ = ["GRAVE", "is_grave", "may_be_grave"]

GRAVE: Final = b'{"format": "cairn.grave"}'
"""No record: a record has a version and a checksum as well."""

_CRC32C: Final[str] = google_crc32c.Checksum(GRAVE).hexdigest().decode()
_ETAG: Final[str] = hashlib.md5(GRAVE, usedforsecurity=False).hexdigest()


def is_grave(listed: ListedObject) -> bool | None:
    """Return whether a listed object is a grave; None if only its bytes can tell.

    A listing has sizes, and on most stores a digest; under KMS an ETag is none.
    """
    if not may_be_grave(listed.name) or listed.size != len(GRAVE):
        return False
    if listed.crc32c is not None:
        return listed.crc32c == _CRC32C
    return True if listed.stamp.strip('"') == _ETAG else None


def may_be_grave(name: str) -> bool:
    """Return True for the names of records; other objects may have any bytes."""
    return name.endswith(".json")
