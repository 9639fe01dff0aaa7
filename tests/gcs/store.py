"""The double's folder: its buckets, and the clock that numbers every change."""

from __future__ import annotations

import fcntl
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.gcs.conditions import Conditions
from tests.gcs.errors import ConflictError, FolderInUseError, InvalidRequestError, NotFoundError
from tests.gcs.folder import write_json
from tests.gcs.objects import Bucket
from tests.gcs.resources import StoredBucket, timestamp

BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
RESERVED_MICROSECONDS = 60_000_000


class GenerationClock:
    """Numbers that only grow, also across restarts and clocks that go back.

    They are microseconds since 1970, as on GCS, or one more than the last. The file holds a
    bound that no number handed out has reached; a restart goes on from it.
    """

    def __init__(self, file: Path, now: Callable[[], float] = time.time) -> None:
        self._file = file
        self._now = now
        self._lock = threading.Lock()
        self._last = int(file.read_text()) if file.exists() else 0
        self._bound = self._last

    def next(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, int(self._now() * 1e6))
            if self._last >= self._bound:
                self._bound = self._last + RESERVED_MICROSECONDS
                temporary = self._file.with_suffix(".tmp")
                temporary.write_text(str(self._bound))
                temporary.replace(self._file)
            return self._last


def _admit_all(_bucket: str, _used: int, _growth: int) -> None:
    """The quota of a store without one."""


class Store:
    """Buckets under one folder. Everything in it is found again by the next process.

    Args:
        root: the folder; made if missing.
        admit: asked before every commit, see `Bucket`.

    Raises:
        FolderInUseError: if another process has it.
    """

    def __init__(self, root: Path, admit: Callable[[str, int, int], None] = _admit_all) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)
        self._claim = open(root / "lock", "wb")  # noqa: SIM115 (held until close)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._claim.close()
            raise FolderInUseError(f"{root}: another process serves this folder") from None
        self._folder = root / "buckets"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._admit = admit
        self._lock = threading.RLock()
        self._clock = GenerationClock(root / "generation")
        self._buckets: dict[str, Bucket] = {}
        for path in self._folder.iterdir():
            if path.name.startswith("."):
                shutil.rmtree(path)
            else:
                self._buckets[path.name] = self._open(path)

    def close(self) -> None:
        """Lets another process have the folder."""
        self._claim.close()

    def _open(self, path: Path) -> Bucket:
        return Bucket(path, next_generation=self._clock.next, admit=self._admit)

    def bucket(self, name: str) -> Bucket:
        """A bucket by name.

        Raises:
            NotFoundError: if there is none.
        """
        found = self._buckets.get(name)
        if found is None:
            raise NotFoundError("The specified bucket does not exist.")
        return found

    def buckets(self) -> list[Bucket]:
        """All buckets, by name."""
        with self._lock:
            return [self._buckets[name] for name in sorted(self._buckets)]

    def create_bucket(self, name: str, fields: Mapping[str, Any] | None = None) -> Bucket:
        """Makes a bucket.

        Raises:
            InvalidRequestError: if the name is none that GCS takes (3 to 63 characters).
            ConflictError: if it exists.
        """
        if not BUCKET_NAME.fullmatch(name):
            raise InvalidRequestError(f"Invalid bucket name: '{name}'")
        with self._lock:
            if name in self._buckets:
                raise ConflictError(
                    "Your previous request to create the named bucket succeeded "
                    "and you already own it."
                )
            now = timestamp()
            info = StoredBucket(name, self._clock.next(), 1, now, now, dict(fields or {}))
            staging = self._folder / f".new-{uuid.uuid4().hex}"
            staging.mkdir()
            write_json(staging / "bucket.json", info.to_json())
            staging.rename(self._folder / name)
            self._buckets[name] = self._open(self._folder / name)
            return self._buckets[name]

    def patch_bucket(
        self, name: str, patch: Mapping[str, Any], conditions: Conditions
    ) -> StoredBucket:
        """Changes a bucket's fields."""
        bucket = self.bucket(name)
        with bucket.lock:
            conditions.check_write(bucket.info)
            info = bucket.info.patched(patch)
            bucket.folder.write_bucket(info)
            bucket.info = info
            return info

    def delete_bucket(
        self, name: str, conditions: Conditions | None = None, *, force: bool = False
    ) -> None:
        """Removes a bucket.

        Args:
            name: bucket name.
            conditions: what the bucket's metageneration must be.
            force: with all its objects; otherwise only an empty one.

        Raises:
            ConflictError: if it holds objects and `force` is not set.
        """
        with self._lock:
            bucket = self.bucket(name)
            with bucket.lock:
                if conditions is not None:
                    conditions.check_write(bucket.info)
                if not force and not bucket.is_empty():
                    raise ConflictError("The bucket you tried to delete is not empty.")
                del self._buckets[name]
                grave = self._folder / f".old-{uuid.uuid4().hex}"
                bucket.folder.path.rename(grave)
        shutil.rmtree(grave)
