"""Objects of the double: stored under conditions, read in ranges, copied, deleted, listed."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import format_datetime
from urllib.parse import quote, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.gcs.downloads import parse_range
from tests.gcs.errors import ApiError, NotFoundError
from tests.gcs.listing import MAX_RESULTS, Query, list_page
from tests.gcs.resources import StoredObject
from tests.gcs.service import Service
from tests.gcs.staging import StagedFile
from tests.gcs.wire import Body, Request, Response
from tests.s3.errors import PreconditionFailedError, S3Error

MAX_KEY_BYTES = 1024
MAX_COPY_BYTES = 5 << 30
CHECKSUM = "x-amz-checksum-crc32c"


def etag_of(stored: StoredObject) -> str:
    """Return the ETag: the MD5 of a small object as on S3, so that equal bytes have equal ones.

    One of several parts, and a large one, have another: there it is no digest, as under KMS.
    """
    if stored.md5 is not None and stored.component_count is None:
        return f'"{base64.b64decode(stored.md5).hex()}"'
    return f'"{stored.generation:032x}-{stored.component_count or 1}"'


@dataclass(frozen=True)
class Matches:
    """The conditions of a request: `If-Match` and `If-None-Match`, or those of a copy's source."""

    match: str | None = None
    none_match: str | None = None

    @classmethod
    def parse(cls, headers: Mapping[str, str], prefix: str = "") -> Matches:
        return cls(headers.get(f"{prefix}if-match"), headers.get(f"{prefix}if-none-match"))

    def check_write(self, current: StoredObject | None) -> None:
        """Refuse a change unless the conditions hold of what is stored.

        Raises:
            NotFoundError: something is to be replaced, and there is nothing.
            PreconditionFailedError: a condition does not hold.
        """
        if self.none_match is not None:
            if self.none_match != "*":
                raise S3Error(501, "NotImplemented", "If-None-Match of a write takes * alone")
            if current is not None:
                raise PreconditionFailedError("If-None-Match")
        if self.match is not None:
            if current is None:
                raise NotFoundError("The specified key does not exist.")
            if not _is_among(etag_of(current), self.match):
                raise PreconditionFailedError("If-Match")

    def check_read(self, current: StoredObject) -> None:
        """Refuse a read unless the conditions hold.

        Raises:
            ApiError: 304 or 412.
        """
        if self.match is not None and not _is_among(etag_of(current), self.match):
            raise PreconditionFailedError("If-Match")
        if self.none_match is not None and _is_among(etag_of(current), self.none_match):
            raise ApiError(304, "NotModified", "Not Modified")


def _is_among(etag: str, asked: str) -> bool:
    tags = [tag.strip().strip('"') for tag in asked.split(",")]
    return "*" in tags or etag.strip('"') in tags


def headers_of(stored: StoredObject, request: Request) -> dict[str, str]:
    """Return the headers that describe an object."""
    headers = {
        "Content-Type": stored.content_type,
        "ETag": etag_of(stored),
        "Last-Modified": format_datetime(datetime.fromisoformat(stored.updated), usegmt=True),
        "Accept-Ranges": "bytes",
    }
    asked = request.headers.get("x-amz-checksum-mode", "").upper() == "ENABLED"
    if asked and stored.fields.get("metadata", {}).get("checksum") == "crc32c":
        headers[CHECKSUM] = stored.crc32c
    return headers


def blocks_of(body: Body, headers: Mapping[str, str]) -> Iterator[bytes]:
    """Yield a body's bytes, out of the chunks in which AWS's libraries wrap a stream.

    Raises:
        S3Error: a chunk is malformed.
    """
    if "aws-chunked" not in headers.get("content-encoding", ""):
        yield from body.blocks()
        return
    rest = b""

    def line() -> bytes:
        nonlocal rest
        while b"\r\n" not in rest:
            block = body.read()
            if not block:
                raise S3Error(400, "IncompleteBody")
            rest += block
        text, rest = rest.split(b"\r\n", 1)
        return text

    while size := int(line().split(b";")[0], 16):
        while size:
            if not rest:
                rest = body.read()
                if not rest:
                    raise S3Error(400, "IncompleteBody")
            block, rest = rest[:size], rest[size:]
            size -= len(block)
            yield block
        line()
    for _ in body.blocks():  # checksums after the bytes, which this double does not read
        pass


def receive(staged: StagedFile, request: Request) -> None:
    """Write a request's body, and hold it against the checksums that the client sent.

    Raises:
        S3Error: they differ.
    """
    announced = request.headers.get("x-amz-content-sha256", "")
    sha256 = hashlib.sha256() if re.fullmatch("[0-9a-f]{64}", announced) else None
    for block in blocks_of(request.body, request.headers):
        staged.write(block)
        if sha256 is not None:
            sha256.update(block)
    if sha256 is not None and sha256.hexdigest() != announced:
        raise S3Error(400, "XAmzContentSHA256Mismatch")
    expected = {}
    if CHECKSUM in request.headers:
        expected["crc32c"] = request.headers[CHECKSUM]
    if "content-md5" in request.headers:
        expected["md5"] = request.headers["content-md5"]
    try:
        staged.verify(expected)
    except ApiError as error:
        raise S3Error(400, "BadDigest", error.message) from None


def fields_of(request: Request) -> dict[str, object]:
    """Return what an object's owner set: its type, and whether it has a checksum."""
    algorithm = request.headers.get("x-amz-checksum-algorithm", "").upper()
    has_checksum = CHECKSUM in request.headers or algorithm == "CRC32C"
    fields: dict[str, object] = {"metadata": {"checksum": "crc32c"}} if has_checksum else {}
    if "content-type" in request.headers:
        fields["contentType"] = request.headers["content-type"]
    return fields


def put(service: Service, request: Request) -> Response:
    """`PutObject`."""
    bucket = service.store.bucket(request.bucket)
    if len(request.name.encode()) > MAX_KEY_BYTES:
        raise S3Error(400, "KeyTooLongError")
    staged = bucket.stage()
    try:
        receive(staged, request)
        stored = bucket.commit(
            request.name,
            staged,
            fields=fields_of(request),
            conditions=Matches.parse(request.headers),
        )
    finally:
        staged.discard()
    return Response(200, {"ETag": etag_of(stored)})


def get(service: Service, request: Request) -> Response:
    """`GetObject` and `HeadObject`."""
    bucket = service.store.bucket(request.bucket)
    conditions = Matches.parse(request.headers)
    stored, file = bucket.open(request.name, None, conditions)
    try:
        asked = parse_range(request.headers.get("range"), stored.size)
    except ApiError:
        file.close()
        raise
    headers = headers_of(stored, request)
    start, stop = asked or (0, stored.size)
    if asked is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
    status = 200 if asked is None else 206
    return Response(status, headers, file=file, offset=start, count=stop - start)


def delete(service: Service, request: Request) -> Response:
    """`DeleteObject`: of what is not there, too."""
    conditions = Matches.parse(request.headers)
    bucket = service.store.bucket(request.bucket)
    try:
        bucket.delete(request.name, conditions=conditions)
    except NotFoundError:
        if bucket.find(request.name) is not None:
            raise
    return Response(204)


def delete_many(service: Service, request: Request) -> Response:
    """`DeleteObjects`."""
    bucket = service.store.bucket(request.bucket)
    keys = _keys(request.body.read_all())
    if len(keys) > MAX_RESULTS:
        raise S3Error(400, "MalformedXML")
    for key in keys:
        if bucket.find(key) is not None:
            bucket.delete(key)
    deleted = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
    return xml(f"<DeleteResult>{deleted}</DeleteResult>")


def _keys(data: bytes) -> list[str]:
    tree = ElementTree.fromstring(data)
    return [node.text or "" for node in tree.iter() if node.tag.rpartition("}")[2] == "Key"]


def source_of(request: Request) -> tuple[str, str]:
    """Return bucket and key in `x-amz-copy-source`."""
    bucket, _, key = unquote(request.headers["x-amz-copy-source"].lstrip("/")).partition("/")
    return bucket, key


def copy(service: Service, request: Request) -> Response:
    """`CopyObject`: at most 5 GB, as on S3."""
    bucket_name, key = source_of(request)
    source_bucket = service.store.bucket(bucket_name)
    source = source_bucket.get(key)
    if source.size > MAX_COPY_BYTES:
        raise S3Error(400, "InvalidRequest", f"expected at most {MAX_COPY_BYTES} bytes")
    Matches.parse(request.headers, "x-amz-copy-source-").check_read(source)
    stored = service.store.bucket(request.bucket).link(
        source,
        source_bucket,
        request.name,
        fields=dict(source.fields),
        conditions=Matches.parse(request.headers),
    )
    body = f"<ETag>{escape(etag_of(stored))}</ETag><LastModified>{stored.updated}</LastModified>"
    return xml(f"<CopyObjectResult>{body}</CopyObjectResult>")


def list_objects(service: Service, request: Request) -> Response:
    """`ListObjectsV2`."""
    query = request.query
    limit = int(query.get("max-keys", str(MAX_RESULTS)))
    asked = {"prefix": query.get("prefix", ""), "delimiter": query.get("delimiter", "")}
    asked["maxResults"] = str(min(limit, MAX_RESULTS) or 1)
    if "continuation-token" in query:
        asked["pageToken"] = query["continuation-token"]
    parsed = Query.parse(asked)
    if "start-after" in query and parsed.after is None:
        parsed = Query(parsed.prefix, parsed.delimiter, after=query["start-after"])
    page = list_page(service.store.bucket(request.bucket), parsed)
    encoded = query.get("encoding-type") == "url"

    def text(name: str) -> str:
        return escape(quote(name) if encoded else name)

    items = "".join(
        f"<Contents><Key>{text(stored.name)}</Key><LastModified>{stored.updated}</LastModified>"
        f"<ETag>{escape(etag_of(stored))}</ETag><Size>{stored.size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for stored in page.items
    )
    prefixes = "".join(
        f"<CommonPrefixes><Prefix>{text(name)}</Prefix></CommonPrefixes>" for name in page.prefixes
    )
    more = page.next_token
    token = f"<NextContinuationToken>{more}</NextContinuationToken>" if more else ""
    return xml(
        f"<ListBucketResult><Name>{request.bucket}</Name><Prefix>{text(parsed.prefix)}</Prefix>"
        f"{'<EncodingType>url</EncodingType>' if encoded else ''}"
        f"<KeyCount>{len(page.items) + len(page.prefixes)}</KeyCount><MaxKeys>{limit}</MaxKeys>"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}{items}{prefixes}"
        "</ListBucketResult>"
    )


def xml(text: str, status: int = 200) -> Response:
    """Return an answer in XML."""
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'
    return Response(status, {"Content-Type": "application/xml"}, content=body.encode())
