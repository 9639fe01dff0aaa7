"""One bucket: its live objects, their versions, and atomic commits."""

from __future__ import annotations

import bisect
import os
import threading
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tests.gcs.conditions import Conditions
from tests.gcs.errors import NotFoundError
from tests.gcs.folder import BucketFolder
from tests.gcs.resources import StoredObject, timestamp
from tests.gcs.staging import StagedFile

NO_CONDITIONS = Conditions()


class Bucket:
    """The objects of one bucket.

    Args:
        path: the bucket's folder, which exists and holds `bucket.json`.
        next_generation: gives a number above every earlier one.
        admit: called under the lock with (bucket name, bytes in use, bytes to add) before a
            commit; raises to refuse it.
    """

    def __init__(
        self,
        path: Path,
        *,
        next_generation: Callable[[], int],
        admit: Callable[[str, int, int], None],
    ) -> None:
        self.folder = BucketFolder(path)
        self.info = self.folder.read_bucket()
        self.lock = threading.RLock()
        self._next_generation = next_generation
        self._admit = admit
        self._objects = {stored.name: stored for stored in self.folder.read_objects()}
        self._names = sorted(self._objects)
        self.used_bytes = sum(stored.size for stored in self._objects.values())

    @property
    def name(self) -> str:
        return self.info.name

    def find(self, name: str) -> StoredObject | None:
        """The live version of a name, or None."""
        return self._objects.get(name)

    def get(self, name: str, generation: int | None = None) -> StoredObject:
        """The live version of a name.

        Raises:
            NotFoundError: if there is none, or another generation was asked for.
        """
        stored = self._objects.get(name)
        if stored is None or generation not in (None, stored.generation):
            raise NotFoundError(f"No such object: {self.name}/{name}")
        return stored

    def open(
        self, name: str, generation: int | None = None, conditions: Conditions = NO_CONDITIONS
    ) -> tuple[StoredObject, BinaryIO]:
        """The live version and its bytes, which stay readable when it is replaced meanwhile."""
        with self.lock:
            stored = self.get(name, generation)
            conditions.check_read(stored)
            return stored, open(self.folder.data(stored.generation), "rb", buffering=0)

    def reserve(self, name: str, size: int) -> None:
        """Asks whether `size` bytes under this name would be let in now; commit asks again.

        Raises:
            ApiError: if the quota refuses them.
        """
        current = self._objects.get(name)
        self._admit(self.name, self.used_bytes, size - (current.size if current else 0))

    def stage(self, name: str | None = None) -> StagedFile:
        """A new staged file, or the one of that name, continued."""
        return StagedFile(self.folder.staging / f"{name or uuid.uuid4().hex}.part")

    def commit(
        self,
        name: str,
        staged: StagedFile,
        *,
        fields: Mapping[str, Any],
        conditions: Conditions = NO_CONDITIONS,
        component_count: int | None = None,
    ) -> StoredObject:
        """Makes staged bytes the live version of a name, all at once.

        Raises:
            PreconditionError: if a condition fails now; the staged file is left to the caller.
        """
        staged.close()
        md5 = staged.md5 if component_count is None else None
        return self._publish(
            name,
            lambda target: os.rename(staged.path, target),
            size=staged.size,
            crc32c=staged.crc32c,
            md5=md5,
            component_count=component_count,
            fields=fields,
            conditions=conditions,
        )

    def link(
        self,
        source: StoredObject,
        source_bucket: Bucket,
        name: str,
        *,
        fields: Mapping[str, Any],
        conditions: Conditions = NO_CONDITIONS,
    ) -> StoredObject:
        """Copies an object on the server: a second name for the same, unchanging bytes."""
        first, second = sorted((source_bucket, self), key=lambda bucket: bucket.name)
        with first.lock, second.lock:
            source_bucket.get(source.name, source.generation)
            origin = source_bucket.folder.data(source.generation)
            return self._publish(
                name,
                lambda target: os.link(origin, target),
                size=source.size,
                crc32c=source.crc32c,
                md5=source.md5,
                component_count=source.component_count,
                fields=fields,
                conditions=conditions,
            )

    def _publish(
        self,
        name: str,
        place: Callable[[Path], None],
        *,
        size: int,
        fields: Mapping[str, Any],
        conditions: Conditions,
        **checksums: Any,
    ) -> StoredObject:
        with self.lock:
            current = self._objects.get(name)
            conditions.check_write(current)
            growth = size - (current.size if current else 0)
            self._admit(self.name, self.used_bytes, growth)
            now = timestamp()
            stored = StoredObject(
                bucket=self.name,
                name=name,
                generation=self._next_generation(),
                metageneration=1,
                size=size,
                created=now,
                updated=now,
                fields=dict(fields),
                **checksums,
            )
            place(self.folder.data(stored.generation))
            self.folder.write_object(stored)
            if current is None:
                bisect.insort(self._names, name)
            self._objects[name] = stored
            self.used_bytes += growth
        if current is not None:
            self.folder.data(current.generation).unlink(missing_ok=True)
        return stored

    def update(
        self,
        name: str,
        change: Callable[[StoredObject], Mapping[str, Any]],
        *,
        generation: int | None,
        conditions: Conditions,
    ) -> StoredObject:
        """Changes the fields of the live version; `change` gets it and returns the new fields."""
        with self.lock:
            current = self.get(name, generation)
            conditions.check_write(current)
            stored = current.patched(change(current))
            self.folder.write_object(stored)
            self._objects[name] = stored
            return stored

    def delete(
        self,
        name: str,
        *,
        generation: int | None = None,
        conditions: Conditions = NO_CONDITIONS,
    ) -> None:
        """Removes the live version.

        Raises:
            NotFoundError: if there is none, or another generation was asked for.
            PreconditionError: if a condition fails.
        """
        with self.lock:
            current = self.get(name, generation)
            conditions.check_write(current)
            self.folder.remove_object(name)
            del self._objects[name]
            del self._names[bisect.bisect_left(self._names, name)]
            self.used_bytes -= current.size
        self.folder.data(current.generation).unlink(missing_ok=True)

    def batch(self, start: str, *, after: bool, limit: int = 256) -> list[StoredObject]:
        """Up to `limit` live objects in name order, from `start` on, or only after it."""
        with self.lock:
            find = bisect.bisect_right if after else bisect.bisect_left
            index = find(self._names, start)
            return [self._objects[name] for name in self._names[index : index + limit]]

    def all(self) -> list[StoredObject]:
        """All live objects at one moment, in name order."""
        with self.lock:
            return [self._objects[name] for name in self._names]

    def is_empty(self) -> bool:
        return not self._objects
