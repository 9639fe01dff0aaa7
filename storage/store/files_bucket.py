"""Files in buckets, as far as they are the same in every kind; `files_gcs` and `files_s3` differ.

A driver stats a file, reads one range, uploads, and copies within the store.
"""

import abc
import builtins
import io
from typing import Any, BinaryIO, Final, cast

import google_crc32c
from typing_extensions import override

from cairn.storage.errors import CorruptionError
from cairn.storage.store.buckets import bucket_driver
from cairn.storage.store.files import BLOCK_BYTES, FileEntry, Files, FileWriter
from cairn.storage.store.listings import ListedPage
from cairn.storage.store.objects import ObjectStore

__all__ = ["BucketFiles", "BucketWriter"]

_RANGE_BYTES: Final = 8 * BLOCK_BYTES
"""Most bytes per request, so that the answer arrives within the deadline."""


class BucketFiles(Files):
    """`Files` of a folder in a bucket."""

    @abc.abstractmethod
    def _read_part(self, rel: str, start: int, end: int) -> bytes:
        """Return the bytes of a range that is not empty, read by one request; see `read_range`."""

    @override
    def list(self, rel: str = "") -> builtins.list[FileEntry]:
        prefix = self._prefix(rel)
        entries = []
        for page in bucket_driver(self.uri).list_pages(self.uri, prefix, "/"):
            entries += [FileEntry(folder[len(prefix) :], 0, True) for folder in page.folders]
            entries += _entries(page, prefix)
        return sorted(entries)

    @override
    def walk(self, rel: str = "") -> builtins.list[FileEntry]:
        prefix = self._prefix(rel)
        pages = bucket_driver(self.uri).list_pages(self.uri, prefix, "")
        return sorted(entry for page in pages for entry in _entries(page, prefix))

    @override
    def open_read(self, rel: str) -> BinaryIO:
        size = self.stat(rel).size
        buffer = max(1, min(size, BLOCK_BYTES))
        return cast("BinaryIO", io.BufferedReader(_Stream(self, rel, size), buffer))

    @override
    def read_range(self, rel: str, start: int, end: int) -> bytes:
        if start >= end:
            self.stat(rel)
            return b""
        parts: builtins.list[bytes] = []
        for low in range(start, end, _RANGE_BYTES):
            high = min(low + _RANGE_BYTES, end)
            parts.append(self._read_part(rel, low, high))
            if len(parts[-1]) < high - low:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @override
    def delete_tree(self, rel: str) -> None:
        objects = ObjectStore.open(self.uri)
        objects.delete(rel)
        objects.delete_prefix(f"{rel}/")

    def _prefix(self, rel: str) -> str:
        folder = self._checked_folder(rel)
        path = "/".join(filter(None, (self.uri.path, folder)))
        return f"{path}/" if path else ""


def _entries(page: ListedPage, prefix: str) -> list[FileEntry]:
    return [
        FileEntry(item.name[len(prefix) :], item.size, False, item.crc32c, etag=item.stamp)
        for item in page.objects
    ]


class BucketWriter(FileWriter):
    """Upload that compares the stored size and checksum with those of the bytes that were sent."""

    def __init__(self, files: BucketFiles, rel: str) -> None:
        self._files, self._rel = files, rel
        self._shown = files.uri / rel
        self._checksum = google_crc32c.Checksum()
        self._size = 0

    @abc.abstractmethod
    def _send(self, data: bytes) -> None:
        """Upload the next bytes, or keep them until there are enough for a request."""

    @abc.abstractmethod
    def _finish(self) -> None:
        """Upload what is left, and make the file visible."""

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        block = data if isinstance(data, bytes) else bytes(data)
        self._checksum.update(block)
        self._size += len(block)
        self._send(block)
        return len(block)

    @override
    def commit(self) -> None:
        self._finish()
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
        self.etag = stored.etag


class _Stream(io.RawIOBase):
    """Reads of a file, each of them a request."""

    def __init__(self, files: BucketFiles, rel: str, size: int) -> None:
        self._files, self._rel, self._size, self._at = files, rel, size, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def readall(self) -> bytes:
        data = self._files.read_range(self._rel, self._at, max(self._at, self._size))
        self._at += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        stop = min(self._size, self._at + len(buffer))
        if self._at >= stop:
            return 0
        data = self._files.read_range(self._rel, self._at, stop)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
