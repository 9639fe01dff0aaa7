"""What the double knows of a bucket and of an object, and the JSON that clients see of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

SETTABLE_OBJECT_FIELDS = frozenset(
    {
        "cacheControl",
        "contentDisposition",
        "contentEncoding",
        "contentLanguage",
        "contentType",
        "customTime",
        "eventBasedHold",
        "metadata",
        "storageClass",
        "temporaryHold",
    }
)
READ_ONLY_BUCKET_FIELDS = frozenset(
    {"kind", "id", "name", "selfLink", "generation", "metageneration", "timeCreated", "updated"}
)


def timestamp() -> str:
    """Now, as Google writes it: RFC 3339, UTC, milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def merge_patch(current: Mapping[str, Any], patch: Mapping[str, Any]) -> dict[str, Any]:
    """PATCH semantics: null removes a key, nested objects merge, everything else replaces."""
    merged = dict(current)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = merge_patch(merged[key], value)
        else:
            merged[key] = value
    return merged


@dataclass(frozen=True)
class StoredObject:
    """One live object: its version, its bytes' checksums and the fields its owner set.

    Attributes:
        size: bytes.
        crc32c: base64 of the big-endian checksum.
        md5: base64, or None: composite and large objects have none, as on GCS.
        fields: what clients may set (`SETTABLE_OBJECT_FIELDS`).
    """

    bucket: str
    name: str
    generation: int
    metageneration: int
    size: int
    crc32c: str
    md5: str | None
    created: str
    updated: str
    component_count: int | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def etag(self) -> str:
        return f"{self.generation:x}/{self.metageneration:x}"

    @property
    def content_type(self) -> str:
        return str(self.fields.get("contentType", "application/octet-stream"))

    def to_json(self) -> dict[str, Any]:
        """The form on disk."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoredObject:
        return cls(**value)

    def patched(self, fields: Mapping[str, Any]) -> StoredObject:
        """The same bytes with other fields: the metageneration moves, the generation does not."""
        return dataclasses.replace(
            self, fields=fields, metageneration=self.metageneration + 1, updated=timestamp()
        )

    def resource(self, base_url: str) -> dict[str, Any]:
        """The object resource of the JSON API."""
        path = f"/b/{quote(self.bucket, safe='')}/o/{quote(self.name, safe='')}"
        resource: dict[str, Any] = {
            "kind": "storage#object",
            "id": f"{self.bucket}/{self.name}/{self.generation}",
            "selfLink": f"{base_url}/storage/v1{path}",
            "mediaLink": (
                f"{base_url}/download/storage/v1{path}?generation={self.generation}&alt=media"
            ),
            "name": self.name,
            "bucket": self.bucket,
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "contentType": self.content_type,
            "storageClass": "STANDARD",
            "size": str(self.size),
            "crc32c": self.crc32c,
            "etag": self.etag,
            "timeCreated": self.created,
            "updated": self.updated,
            "timeStorageClassUpdated": self.created,
            "timeFinalized": self.created,
            **self.fields,
        }
        if self.md5 is not None:
            resource["md5Hash"] = self.md5
        if self.component_count is not None:
            resource["componentCount"] = self.component_count
        return resource


@dataclass(frozen=True)
class StoredBucket:
    """One bucket: its version and the fields its owner set."""

    name: str
    generation: int
    metageneration: int
    created: str
    updated: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The form on disk."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StoredBucket:
        return cls(**value)

    def patched(self, patch: Mapping[str, Any]) -> StoredBucket:
        """The bucket after a PATCH."""
        allowed = {key: value for key, value in patch.items() if key not in READ_ONLY_BUCKET_FIELDS}
        return dataclasses.replace(
            self,
            fields=merge_patch(self.fields, allowed),
            metageneration=self.metageneration + 1,
            updated=timestamp(),
        )

    def resource(self, base_url: str) -> dict[str, Any]:
        """The bucket resource of the JSON API."""
        return {
            "location": "US",
            "locationType": "multi-region",
            "storageClass": "STANDARD",
            "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": True}},
            **self.fields,
            "kind": "storage#bucket",
            "id": self.name,
            "name": self.name,
            "projectNumber": "1",
            "selfLink": f"{base_url}/storage/v1/b/{self.name}",
            "generation": str(self.generation),
            "metageneration": str(self.metageneration),
            "etag": f"{self.metageneration:x}",
            "timeCreated": self.created,
            "updated": self.updated,
        }
