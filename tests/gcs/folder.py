"""The files of one bucket, and what a crash may leave among them.

<bucket>/bucket.json       the bucket's own fields
<bucket>/data/<generation> the bytes of one object version; never changed once there
<bucket>/meta/<hash>.json  the live version of one name; its rename is the commit
<bucket>/staging/          uploads on their way in; resumable ones survive a restart

A kill -9 between the rename of the bytes and that of the metadata leaves bytes without a name,
which the next start removes. Nothing is flushed to the medium: the double outlives its process,
not a power cut.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.gcs.resources import StoredBucket, StoredObject

SESSION_LIFETIME_SECONDS = 7 * 24 * 3600


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces a file atomically."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    temporary.write_text(json.dumps(value))
    os.replace(temporary, path)


class BucketFolder:
    """Paths in a bucket's folder, which exists and holds `bucket.json`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for folder in ("data", "meta", "staging"):
            (path / folder).mkdir(exist_ok=True)

    @property
    def staging(self) -> Path:
        return self.path / "staging"

    def data(self, generation: int) -> Path:
        """The bytes of a version."""
        return self.path / "data" / str(generation)

    def _meta(self, name: str) -> Path:
        return self.path / "meta" / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"

    def read_bucket(self) -> StoredBucket:
        return StoredBucket.from_json(json.loads((self.path / "bucket.json").read_text()))

    def write_bucket(self, bucket: StoredBucket) -> None:
        write_json(self.path / "bucket.json", bucket.to_json())

    def write_object(self, stored: StoredObject) -> None:
        """Makes a version the live one of its name."""
        write_json(self._meta(stored.name), stored.to_json())

    def remove_object(self, name: str) -> None:
        """Leaves a name without a live version."""
        self._meta(name).unlink()

    def read_objects(self) -> list[StoredObject]:
        """The live versions; removes what crashes and forgotten uploads have left."""
        objects = []
        for file in (self.path / "meta").iterdir():
            if file.suffix == ".json":
                objects.append(StoredObject.from_json(json.loads(file.read_text())))
            else:
                file.unlink()
        live = {str(stored.generation) for stored in objects}
        for file in (self.path / "data").iterdir():
            if file.name not in live:
                file.unlink()
        oldest = time.time() - SESSION_LIFETIME_SECONDS
        for file in self.staging.iterdir():
            resumable = file.name.startswith("session-") and file.suffix != ".tmp"
            if not resumable or file.stat().st_mtime < oldest:
                file.unlink()
        return objects
