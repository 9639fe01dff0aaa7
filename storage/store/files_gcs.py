"""Files in Google Cloud Storage: ranged reads, checked uploads, copies within the store.

Requests go through gcsfs, listings past its filesystem layer, which would cache them.
"""

import contextlib
import functools
from http import HTTPStatus
from typing import Any, Final

from typing_extensions import override

from cairn.storage.errors import NotFoundError
from cairn.storage.store.deadlines import call_with_deadline, deadline_after
from cairn.storage.store.files import (
    BLOCK_BYTES,
    Files,
    FileStat,
    FileWriter,
    request,
    translated_errors,
)
from cairn.storage.store.files_bucket import BucketFiles, BucketWriter
from cairn.storage.store.gcs import crc32c_of, filesystem
from cairn.storage.store.requests import timed_request
from cairn.storage.store.uri import StoreURI, check_path

__all__ = ["GcsFiles"]

_DISCARD_SECONDS: Final = 5.0
"""Most seconds to try to cancel an upload in the store."""


class GcsFiles(BucketFiles):
    """`Files` of a folder in a bucket of Google's."""

    def __init__(self, uri: StoreURI) -> None:
        super().__init__(uri)
        self._fs = filesystem(uri)

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
    def _read_part(self, rel: str, start: int, end: int) -> bytes:
        path = self._path(rel)
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
        return _Upload(self, rel, stream)

    @override
    def _copy_within(self, source: str, target: Files, target_rel: str, etag: str | None) -> bool:
        if not isinstance(target, GcsFiles):
            return False
        names = (self.uri.bucket, (self.uri / source).path)
        copy = (target.uri.bucket, (target.uri / target_rel).path)
        query: dict[str, Any] = {"ifSourceGenerationMatch": etag} if etag is not None else {}
        while True:  # GCS copies a large object to another location in many requests
            rewrite = functools.partial(self._rewritten, names, copy, query)
            with timed_request("copy", self.uri / source):
                done = call_with_deadline(rewrite, path=self.uri / source)
            if done["done"] is True:
                return True
            query = {**query, "rewriteToken": done["rewriteToken"]}

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

    def _path(self, rel: str) -> str:
        root = (self.uri.bucket, self.uri.path)
        return "/".join(filter(None, (*root, check_path(rel, within=self.uri))))


class _Upload(BucketWriter):
    """Upload by gcsfs, whose `close` commits it."""

    def __init__(self, files: GcsFiles, rel: str, stream: Any) -> None:
        super().__init__(files, rel)
        self._stream = stream
        self._is_over = False

    @override
    def _send(self, data: bytes) -> None:
        request("write", self._shown, self._stream.write, data)

    @override
    def _finish(self) -> None:
        request("write", self._shown, self._stream.close)
        self._is_over = True

    @override
    def abort(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        with contextlib.suppress(Exception), deadline_after(_DISCARD_SECONDS):
            call_with_deadline(
                self._stream.discard, path=self._shown
            )  # if this fails, the store expires it
        # Otherwise the garbage collector would close the file, which completes its upload.
        self._stream.closed = True
