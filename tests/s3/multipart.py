"""Uploads in parts: begun, filled in any order, completed at once or aborted."""

from __future__ import annotations

import re
import threading
import uuid
from dataclasses import dataclass, field
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.gcs.errors import ApiError
from tests.gcs.objects import Bucket
from tests.gcs.service import Service
from tests.gcs.staging import StagedFile
from tests.gcs.wire import BLOCK_BYTES, Request, Response
from tests.s3.errors import S3Error
from tests.s3.objects import Matches, etag_of, fields_of, receive, source_of, xml

MIN_PART_BYTES = 5 << 20
MAX_PARTS = 10_000


@dataclass
class Upload:
    """One upload that is neither completed nor aborted.

    Attributes:
        parts: number -> the part's ETag and bytes.
    """

    bucket: Bucket
    name: str
    fields: dict[str, object]
    parts: dict[int, tuple[str, StagedFile]] = field(default_factory=dict)


class Uploads:
    """The open uploads of a double."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[str, Upload] = {}

    def begin(self, service: Service, request: Request) -> Response:
        """`CreateMultipartUpload`."""
        bucket = service.store.bucket(request.bucket)
        upload_id = uuid.uuid4().hex
        with self._lock:
            self._open[upload_id] = Upload(bucket, request.name, fields_of(request))
        return xml(
            f"<InitiateMultipartUploadResult><Bucket>{request.bucket}</Bucket>"
            f"<Key>{escape(request.name)}</Key><UploadId>{upload_id}</UploadId>"
            "</InitiateMultipartUploadResult>"
        )

    def put_part(self, service: Service, request: Request) -> Response:
        """`UploadPart` and `UploadPartCopy`."""
        upload = self._find(request)
        number = int(request.query["partNumber"])
        if not 1 <= number <= MAX_PARTS:
            raise S3Error(400, "InvalidArgument")
        staged = upload.bucket.stage()
        try:
            if "x-amz-copy-source" in request.headers:
                _copy_range(service, request, staged)
            else:
                receive(staged, request)
        except BaseException:
            staged.discard()
            raise
        staged.close()
        etag = f'"{uuid.uuid4().hex}"'
        with self._lock:
            previous = upload.parts.get(number)
            upload.parts[number] = etag, staged
        if previous is not None:
            previous[1].discard()
        if "x-amz-copy-source" in request.headers:
            return xml(f"<CopyPartResult><ETag>{escape(etag)}</ETag></CopyPartResult>")
        return Response(200, {"ETag": etag})

    def complete(self, service: Service, request: Request) -> Response:
        """`CompleteMultipartUpload`: all parts become one object, or none does."""
        upload = self._find(request)
        asked = _parts(request.body.read_all())
        if not asked or asked != sorted(asked):
            raise S3Error(400, "InvalidPartOrder")
        for number, etag in asked:
            part = upload.parts.get(number)
            if part is None or part[0].strip('"') != etag.strip('"'):
                raise S3Error(400, "InvalidPart")
            if number != asked[-1][0] and part[1].size < MIN_PART_BYTES:
                raise S3Error(400, "EntityTooSmall")
        whole = upload.bucket.stage()
        try:
            for number, _ in asked:
                with open(upload.parts[number][1].path, "rb") as file:
                    while block := file.read(BLOCK_BYTES):
                        whole.write(block)
            stored = upload.bucket.commit(
                upload.name,
                whole,
                fields=upload.fields,
                conditions=Matches.parse(request.headers),
                component_count=len(asked),
            )
        finally:
            whole.discard()
        self._end(request)
        return xml(
            f"<CompleteMultipartUploadResult><Key>{escape(upload.name)}</Key>"
            f"<ETag>{escape(etag_of(stored))}</ETag></CompleteMultipartUploadResult>"
        )

    def abort(self, service: Service, request: Request) -> Response:
        """`AbortMultipartUpload`."""
        self._find(request)
        self._end(request)
        return Response(204)

    def list_open(self, service: Service, request: Request) -> Response:
        """`ListMultipartUploads`."""
        with self._lock:
            uploads = [
                f"<Upload><Key>{escape(upload.name)}</Key><UploadId>{upload_id}</UploadId></Upload>"
                for upload_id, upload in self._open.items()
                if upload.bucket.name == request.bucket
            ]
        text = "".join(uploads)
        return xml(f"<ListMultipartUploadsResult>{text}</ListMultipartUploadsResult>")

    def names(self, bucket: str) -> list[str]:
        """Return the keys of the bucket's open uploads."""
        with self._lock:
            return [one.name for one in self._open.values() if one.bucket.name == bucket]

    def _find(self, request: Request) -> Upload:
        with self._lock:
            upload = self._open.get(request.query.get("uploadId", ""))
        if upload is None or upload.name != request.name:
            raise S3Error(404, "NoSuchUpload")
        return upload

    def _end(self, request: Request) -> None:
        with self._lock:
            upload = self._open.pop(request.query["uploadId"], None)
        for _, staged in [] if upload is None else upload.parts.values():
            staged.discard()


def _copy_range(service: Service, request: Request, staged: StagedFile) -> None:
    bucket, key = source_of(request)
    stored, file = service.store.bucket(bucket).open(key)
    with file:
        match = re.fullmatch(
            r"bytes=(\d+)-(\d+)", request.headers.get("x-amz-copy-source-range", "")
        )
        start, stop = (int(match[1]), int(match[2]) + 1) if match else (0, stored.size)
        if stop > stored.size:
            raise ApiError(416, "InvalidRange", "the range is beyond the source's end")
        file.seek(start)
        while start < stop:
            block = file.read(min(BLOCK_BYTES, stop - start))
            staged.write(block)
            start += len(block)


def _parts(data: bytes) -> list[tuple[int, str]]:
    tree = ElementTree.fromstring(data)
    parts = []
    for node in tree.iter():
        if node.tag.rpartition("}")[2] == "Part":
            texts = {child.tag.rpartition("}")[2]: child.text or "" for child in node}
            parts.append((int(texts["PartNumber"]), texts["ETag"]))
    return parts
