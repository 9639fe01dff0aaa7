"""Files on Google Cloud Storage: one request per operation, straight to its JSON API.

gcsfs carries the requests (credentials, retries, uploads). Listings and stats bypass its filesystem
layer, which caches them and makes more requests than needed.
"""

import builtins
import functools
from http import HTTPStatus
from typing import Any, Final

import google_crc32c
from typing_extensions import override

from cairn.storage.errors import CorruptionError, NotFoundError
from cairn.storage.store.deadlines import call_with_deadline
from cairn.storage.store.files import (
    BLOCK_BYTES,
    FileEntry,
    Files,
    FileStat,
    FileWriter,
    request,
    translated_errors,
)
from cairn.storage.store.files_remote import RemoteFiles, UploadWriter
from cairn.storage.store.gcs import crc32c_of, filesystem
from cairn.storage.store.listings import ListedPage, list_pages
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.requests import timed_request

__all__ = ["GcsFiles"]

_RANGE_BYTES: Final = 8 * BLOCK_BYTES
"""Most bytes per request, so that the answer arrives within the deadline."""


class GcsFiles(RemoteFiles):
    """`Files` of a folder in a bucket."""

    @override
    def _connect(self) -> Any:
        return filesystem(self.uri)

    @override
    def stat(self, rel: str) -> FileStat:
        name = (self.uri / rel).path
        with translated_errors(self.uri / rel, "stat"):
            try:
                metadata = call_with_deadline(
                    lambda: self._fs.call("GET", "b/{}/o/{}", self.uri.bucket, name, json_out=True),
                    path=self.uri / rel,
                )
            except FileNotFoundError as exc:
                raise NotFoundError(
                    path=self.uri / rel, expected="a file", found="nothing"
                ) from exc
        return FileStat(int(metadata["size"]), str(metadata["generation"]), crc32c_of(metadata))

    @override
    def list(self, rel: str = "") -> builtins.list[FileEntry]:
        prefix = self._prefix(rel)
        entries = []
        for page in list_pages(self.uri, prefix, delimiter="/"):
            entries += [FileEntry(folder[len(prefix) :], 0, True) for folder in page.folders]
            entries += self._entries(page, prefix)
        return sorted(entries)

    @override
    def walk(self, rel: str = "") -> builtins.list[FileEntry]:
        prefix = self._prefix(rel)
        return sorted(
            entry for page in list_pages(self.uri, prefix) for entry in self._entries(page, prefix)
        )

    @override
    def read_range(self, rel: str, start: int, end: int) -> bytes:
        path = self._path(rel)
        if start >= end:
            self.stat(rel)
            return b""
        parts: builtins.list[bytes] = []
        for low in range(start, end, _RANGE_BYTES):
            high = min(low + _RANGE_BYTES, end)
            parts.append(self._part(rel, path, low, high))
            if len(parts[-1]) < high - low:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, rel: str, path: str, start: int, end: int) -> bytes:
        """Return the bytes of one range, read with one request."""
        with translated_errors(self.uri / rel, "read"):
            try:
                return call_with_deadline(
                    lambda: bytes(self._fs.cat_file(path, start=start, end=end)),
                    path=self.uri / rel,
                )
            except Exception as exc:
                if getattr(exc, "code", None) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return b""  # the range starts at or after the end of the file
                raise

    @override
    def open_write(self, rel: str, *, read_back: bool = False) -> FileWriter:
        stream = request(
            "write", self.uri / rel, self._fs.open, self._path(rel), "wb", block_size=BLOCK_BYTES
        )
        return _CheckedUpload(self, rel, stream)

    @override
    def delete_tree(self, rel: str) -> None:
        objects = ObjectStore.open(self.uri)
        objects.delete(rel)
        objects.delete_prefix(f"{rel}/")

    @override
    def _copy_within(self, source: str, target: Files, target_rel: str) -> bool:
        if not isinstance(target, GcsFiles):
            return False
        names = (self.uri.bucket, (self.uri / source).path)
        copy = (target.uri.bucket, (target.uri / target_rel).path)
        query: dict[str, Any] = {}
        while True:  # GCS copies a large object to another location in many requests
            rewrite = functools.partial(self._rewritten, names, copy, query)
            with timed_request("copy", self.uri / source):
                done = call_with_deadline(rewrite, path=self.uri / source)
            if done["done"] is True:
                return True
            query = {"rewriteToken": done["rewriteToken"]}

    def _rewritten(
        self, source: tuple[str, str], target: tuple[str, str], query: dict[str, Any]
    ) -> dict[str, Any]:
        """Make one rewrite request and return its answer.

        Errors are not mapped, as either store may be the cause.
        """
        answer: dict[str, Any] = self._fs.call(
            "POST",
            "b/{}/o/{}/rewriteTo/b/{}/o/{}",
            *source,
            *target,
            headers={"Content-Type": "application/json"},
            json_out=True,
            **query,
        )
        return answer

    def _prefix(self, rel: str) -> str:
        folder = self._checked_folder(rel)
        path = "/".join(filter(None, (self.uri.path, folder)))
        return f"{path}/" if path else ""

    @staticmethod
    def _entries(page: ListedPage, prefix: str) -> builtins.list[FileEntry]:
        return [
            FileEntry(item.name[len(prefix) :], item.size, False, item.crc32c)
            for item in page.objects
        ]


class _CheckedUpload(UploadWriter):
    """Upload that compares the checksum which the store computed with its own."""

    def __init__(self, files: GcsFiles, rel: str, stream: Any) -> None:
        super().__init__(stream, files.uri / rel)
        self._files = files
        self._rel = rel
        self._checksum = google_crc32c.Checksum()
        self._size = 0

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        block = data if isinstance(data, bytes) else bytes(data)
        self._checksum.update(block)
        self._size += len(block)
        return super().write(block)

    @override
    def commit(self) -> None:
        super().commit()
        stored = self._files.stat(self._rel)
        crc = self._checksum.digest().hex()
        if stored.size != self._size or stored.crc32c not in (None, crc):
            raise CorruptionError(
                "the upload arrived damaged",
                path=self._shown,
                expected=f"{self._size} bytes, crc32c {crc}",
                found=f"{stored.size} bytes, crc32c {stored.crc32c}",
                next_step="Write it again.",
            )
