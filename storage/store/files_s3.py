"""Files in stores that speak S3: ranged reads, uploads in parts, copies within the store.

Uploads carry the crc32c of each part and of the whole. A store that keeps it tells it in `stat`;
where it does not, whoever needs certainty reads the file.
"""

import base64
import contextlib
from http import HTTPStatus
from typing import Any, Final

import google_crc32c
from typing_extensions import override

from cairn.storage.errors import NotFoundError, StorageError, StoreUnavailableError
from cairn.storage.store.deadlines import deadline_after
from cairn.storage.store.files import Files, FileStat, FileWriter, request, translated_errors
from cairn.storage.store.files_bucket import BucketFiles, BucketWriter
from cairn.storage.store.s3 import call, etag_of, status_of
from cairn.storage.store.uri import StoreURI

__all__ = ["S3Files"]

_PART_BYTES: Final = 32 << 20
"""Size in bytes of a part of an upload. All are equal: some stores require it."""

_MAX_COPY_BYTES: Final = 5 << 30
"""Most bytes that S3 copies in one request."""

_COPY_PART_BYTES: Final = 1 << 30
_DISCARD_SECONDS: Final = 5.0
_READ_TRIES: Final = 4


class S3Files(BucketFiles):
    """`Files` of a folder in a bucket that speaks S3."""

    @override
    def stat(self, rel: str) -> FileStat:
        answer = call(
            "stat", self.uri / rel, "head_object", **self._key(rel), ChecksumMode="ENABLED"
        )
        return FileStat(int(answer["ContentLength"]), etag_of(answer), _crc32c_of(answer))

    @override
    def _read_part(self, rel: str, start: int, end: int) -> bytes:
        for tries_left in reversed(range(_READ_TRIES)):  # the connection may be cut in its midst
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
        part = f"bytes={start}-{end - 1}"
        try:
            return call("read", self.uri / rel, "get_object", **self._key(rel), Range=part)
        except StorageError as exc:
            if _refusal(exc) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return None
            raise

    @override
    def open_write(self, rel: str, *, read_back: bool = False) -> FileWriter:
        return _Upload(self, rel)

    @override
    def _copy_within(self, source: str, target: Files, target_rel: str, etag: str | None) -> bool:
        if not isinstance(target, S3Files):
            return False
        origin: dict[str, Any] = {"CopySource": self._key(source)}
        if etag is not None:
            origin["CopySourceIfMatch"] = etag
        copy = _Copy(self.uri / source, target._key(target_rel), origin)
        try:
            copy.whole()
        except StorageError as exc:  # what is larger than a request copies has a code in each store
            if _refusal(exc) is None or (size := self.stat(source).size) <= _MAX_COPY_BYTES:
                raise
            copy.in_parts(size)
        return True

    def _key(self, rel: str) -> dict[str, str]:
        return {"Bucket": self.uri.bucket, "Key": (self.uri / rel).path}


class _Copy:
    """Copy of an object, made by the store."""

    def __init__(self, shown: StoreURI, to: dict[str, str], origin: dict[str, Any]) -> None:
        self._shown, self._to, self._origin = shown, to, origin

    def whole(self) -> None:
        """Copy by one request."""
        call("copy", self._shown, "copy_object", **self._to, **self._origin)

    def in_parts(self, size: int) -> None:
        """Copy by one request for each part, as larger objects need."""
        upload = call("copy", self._shown, "create_multipart_upload", **self._to)["UploadId"]
        try:
            parts = []
            for number, start in enumerate(range(0, size, _COPY_PART_BYTES), 1):
                stop = min(size, start + _COPY_PART_BYTES)
                answer = call(
                    "copy",
                    self._shown,
                    "upload_part_copy",
                    **self._to,
                    **self._origin,
                    UploadId=upload,
                    PartNumber=number,
                    CopySourceRange=f"bytes={start}-{stop - 1}",
                )
                parts.append({"PartNumber": number, "ETag": answer["CopyPartResult"]["ETag"]})
            _complete("copy", self._shown, self._to, upload, parts)
        except BaseException:
            _abort(self._shown, self._to, upload)
            raise


class _Upload(BucketWriter):
    """Upload of a file: one request if it is small, else parts that are completed at once."""

    def __init__(self, files: S3Files, rel: str) -> None:
        super().__init__(files, rel)
        self._key = files._key(rel)
        self._buffer = bytearray()
        self._upload: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._is_over = False

    @override
    def _send(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            room = _PART_BYTES - len(self._buffer)
            self._buffer += rest[:room]
            rest = rest[room:]
            if len(self._buffer) == _PART_BYTES:
                self._send_part()

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
        crc = _encoded(google_crc32c.Checksum(data))
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

    @override
    def _finish(self) -> None:
        crc = _encoded(self._checksum)
        if self._upload is None:
            data = bytes(self._buffer)
            call("write", self._shown, "put_object", **self._key, Body=data, ChecksumCRC32C=crc)
        else:
            if self._buffer:
                self._send_part()
            whole = {"ChecksumCRC32C": crc, "ChecksumType": "FULL_OBJECT"}
            with contextlib.suppress(NotFoundError):  # completed by a request without an answer
                _complete("write", self._shown, self._key, self._upload, self._parts, **whole)
        self._is_over = True

    @override
    def abort(self) -> None:
        if self._upload is not None and not self._is_over:
            _abort(self._shown, self._key, self._upload)
        self._is_over = True


def _complete(
    operation: Any,
    shown: StoreURI,
    key: dict[str, str],
    upload: str,
    parts: list[dict[str, Any]],
    **options: str,
) -> None:
    """Make an object of an upload's parts."""
    joined = {"Parts": parts}
    call(
        operation,
        shown,
        "complete_multipart_upload",
        **key,
        UploadId=upload,
        MultipartUpload=joined,
        **options,
    )


def _abort(shown: StoreURI, key: dict[str, str], upload: str) -> None:
    """Give an upload's parts back; if that fails, the bucket's lifecycle rule does."""
    with contextlib.suppress(Exception), deadline_after(_DISCARD_SECONDS):
        call("write", shown, "abort_multipart_upload", **key, UploadId=upload)


def _refusal(error: StorageError) -> int | None:
    """Return the HTTP status of an answer that calls the request itself wrong; else None."""
    status = status_of(error.__cause__)
    wrong = (HTTPStatus.BAD_REQUEST, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
    return status if status in wrong else None


def _encoded(checksum: google_crc32c.Checksum) -> str:
    return base64.b64encode(checksum.digest()).decode()


def _crc32c_of(answer: dict[str, Any]) -> str | None:
    """Return the crc32c of a whole object; None if the store keeps none, or one of the parts'."""
    encoded = answer.get("ChecksumCRC32C")
    if not encoded or "-" in encoded or answer.get("ChecksumType", "FULL_OBJECT") != "FULL_OBJECT":
        return None
    return base64.b64decode(encoded).hex()
