"""Files in stores that speak S3: ranged reads, uploads in parts, copies within the store.

Uploads carry the crc32c of each part and of the whole. A store that keeps it tells it in `stat`;
where it does not, whoever needs certainty reads the file.
"""

import base64
import builtins
import contextlib
import io
from typing import Any, BinaryIO, Final, cast

import google_crc32c
from typing_extensions import override

from cairn.storage.errors import CorruptionError, NotFoundError, StoreUnavailableError
from cairn.storage.store.deadlines import deadline_after
from cairn.storage.store.files import (
    BLOCK_BYTES,
    FileEntry,
    Files,
    FileStat,
    FileWriter,
    request,
    translated_errors,
)
from cairn.storage.store.listings import ListedPage, list_pages
from cairn.storage.store.objects import ObjectStore
from cairn.storage.store.s3 import call
from cairn.storage.store.uri import StoreURI

__all__ = ["S3Files"]

_RANGE_BYTES: Final = 8 * BLOCK_BYTES
"""Most bytes per request, so that the answer arrives within the deadline."""

_PART_BYTES: Final = 32 << 20
"""Size in bytes of a part of an upload. All are equal: some stores require it."""

_MAX_COPY_BYTES: Final = 5 << 30
"""Most bytes that S3 copies in one request."""

_COPY_PART_BYTES: Final = 1 << 30
_DISCARD_SECONDS: Final = 5.0
_READ_TRIES: Final = 4


class S3Files(Files):
    """`Files` of a folder in a bucket."""

    @override
    def stat(self, rel: str) -> FileStat:
        answer = call(
            "stat", self.uri / rel, "head_object", **self._key(rel), ChecksumMode="ENABLED"
        )
        return FileStat(int(answer["ContentLength"]), str(answer["ETag"]), _crc32c_of(answer))

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
    def open_read(self, rel: str) -> BinaryIO:
        size = self.stat(rel).size
        return cast("BinaryIO", io.BufferedReader(_Stream(self, rel, size), BLOCK_BYTES))

    @override
    def read_range(self, rel: str, start: int, end: int) -> bytes:
        if start >= end:
            self.stat(rel)
            return b""
        parts: builtins.list[bytes] = []
        for low in range(start, end, _RANGE_BYTES):
            high = min(low + _RANGE_BYTES, end)
            parts.append(self._part(rel, low, high))
            if len(parts[-1]) < high - low:
                break
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _part(self, rel: str, start: int, end: int) -> bytes:
        """Return the bytes of one range; ask again if the connection is cut in its midst."""
        for tries_left in reversed(range(_READ_TRIES)):
            answer = self._requested(rel, start, end)
            if answer is None:
                return b""
            try:
                with translated_errors(self.uri / rel):
                    data: bytes = request("read", self.uri / rel, answer["Body"].read)
                    if len(data) != int(answer["ContentLength"]):
                        raise ConnectionError(f"{len(data)} of {answer['ContentLength']} bytes")
                return data
            except StoreUnavailableError:
                if not tries_left:
                    raise
        raise AssertionError("the last try returns or raises")

    def _requested(self, rel: str, start: int, end: int) -> Any:
        """Request a range; return None if it starts at or after the end of the file."""
        from botocore.exceptions import ClientError

        try:
            return call(
                "read",
                self.uri / rel,
                "get_object",
                **self._key(rel),
                Range=f"bytes={start}-{end - 1}",
            )
        except Exception as exc:
            cause = exc.__cause__
            if isinstance(cause, ClientError) and cause.response["Error"]["Code"] == "InvalidRange":
                return None
            raise

    @override
    def open_write(self, rel: str, *, read_back: bool = False) -> FileWriter:
        return _Upload(self, rel)

    @override
    def delete_tree(self, rel: str) -> None:
        objects = ObjectStore.open(self.uri)
        objects.delete(rel)
        objects.delete_prefix(f"{rel}/")

    @override
    def _copy_within(self, source: str, target: Files, target_rel: str) -> bool:
        if not isinstance(target, S3Files):
            return False
        shown, to = self.uri / source, target._key(target_rel)
        origin = {"CopySource": self._key(source)}
        size = self.stat(source).size
        if size <= _MAX_COPY_BYTES:
            call("copy", shown, "copy_object", **to, **origin)
            return True
        upload = call("copy", shown, "create_multipart_upload", **to)["UploadId"]
        try:
            parts = []
            for number, start in enumerate(range(0, size, _COPY_PART_BYTES), 1):
                stop = min(size, start + _COPY_PART_BYTES)
                answer = call(
                    "copy",
                    shown,
                    "upload_part_copy",
                    **to,
                    **origin,
                    UploadId=upload,
                    PartNumber=number,
                    CopySourceRange=f"bytes={start}-{stop - 1}",
                )
                parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
            call(
                "copy",
                shown,
                "complete_multipart_upload",
                **to,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except BaseException:
            _abort(shown, to, upload)
            raise
        return True

    def _key(self, rel: str) -> dict[str, str]:
        return {"Bucket": self.uri.bucket, "Key": (self.uri / rel).path}

    def _prefix(self, rel: str) -> str:
        folder = self._checked_folder(rel)
        path = "/".join(filter(None, (self.uri.path, folder)))
        return f"{path}/" if path else ""

    @staticmethod
    def _entries(page: ListedPage, prefix: str) -> builtins.list[FileEntry]:
        return [FileEntry(item.name[len(prefix) :], item.size, False) for item in page.objects]


class _Stream(io.RawIOBase):
    """Reads of a file, each of them a request."""

    def __init__(self, files: S3Files, rel: str, size: int) -> None:
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

    def readinto(self, buffer: Any) -> int:
        stop = min(self._size, self._at + len(buffer))
        if self._at >= stop:
            return 0
        data = self._files.read_range(self._rel, self._at, stop)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Upload(FileWriter):
    """Upload of a file: one request if it is small, else parts that are completed at once."""

    def __init__(self, files: S3Files, rel: str) -> None:
        self._files, self._rel = files, rel
        self._shown, self._key = files.uri / rel, files._key(rel)
        self._buffer = bytearray()
        self._whole = google_crc32c.Checksum()
        self._size = 0
        self._upload: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._is_over = False

    @override
    def write(self, data: bytes | bytearray | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._size += view.nbytes
        rest = view
        while rest:
            room = _PART_BYTES - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == _PART_BYTES:
                self._send_part()
        return view.nbytes

    def _send_part(self) -> None:
        if self._upload is None:
            answer = call(
                "write",
                self._shown,
                "create_multipart_upload",
                **self._key,
                ChecksumAlgorithm="CRC32C",
                ChecksumType="FULL_OBJECT",
            )
            self._upload = answer["UploadId"]
        data, self._buffer = bytes(self._buffer), bytearray()
        crc = self._encoded(data)
        number = len(self._parts) + 1
        answer = call(
            "write",
            self._shown,
            "upload_part",
            **self._key,
            UploadId=self._upload,
            PartNumber=number,
            Body=data,
            ChecksumCRC32C=crc,
        )
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32C": crc})

    def _encoded(self, data: bytes) -> str:
        """Return the checksum of some bytes in S3's form; add them to that of the whole."""
        self._whole.update(data)
        return base64.b64encode(google_crc32c.Checksum(data).digest()).decode()

    @override
    def commit(self) -> None:
        if self._upload is None:
            data = bytes(self._buffer)
            crc = self._encoded(data)
            call("write", self._shown, "put_object", **self._key, Body=data, ChecksumCRC32C=crc)
        else:
            if self._buffer:
                self._send_part()
            whole = base64.b64encode(self._whole.digest()).decode()
            with contextlib.suppress(NotFoundError):  # completed by a request without an answer
                call(
                    "write",
                    self._shown,
                    "complete_multipart_upload",
                    **self._key,
                    UploadId=self._upload,
                    MultipartUpload={"Parts": self._parts},
                    ChecksumCRC32C=whole,
                    ChecksumType="FULL_OBJECT",
                )
        self._is_over = True
        stored, crc = self._files.stat(self._rel), self._whole.digest().hex()
        if stored.size != self._size or stored.crc32c not in (None, crc):
            raise CorruptionError(
                "the upload arrived damaged",
                path=self._shown,
                expected=f"{self._size} bytes, crc32c {crc}",
                found=f"{stored.size} bytes, crc32c {stored.crc32c}",
                next_step="Write it again.",
            )

    @override
    def abort(self) -> None:
        if self._upload is not None and not self._is_over:
            _abort(self._shown, self._key, self._upload)
        self._is_over = True


def _abort(shown: StoreURI, key: dict[str, str], upload: str) -> None:
    """Give an upload's parts back; if that fails, the bucket's lifecycle rule does."""
    with contextlib.suppress(Exception), deadline_after(_DISCARD_SECONDS):
        call("write", shown, "abort_multipart_upload", **key, UploadId=upload)


def _crc32c_of(answer: dict[str, Any]) -> str | None:
    """Return the crc32c of a whole object; None if the store keeps none, or one of the parts'."""
    encoded = answer.get("ChecksumCRC32C")
    if not encoded or "-" in encoded or answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    return base64.b64decode(encoded).hex()
