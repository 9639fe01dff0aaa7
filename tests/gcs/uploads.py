"""Uploads: media, multipart and resumable, streamed to a staged file and then committed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from tests.gcs.conditions import Conditions
from tests.gcs.errors import ApiError, ConnectionLostError, InvalidRequestError, PreconditionError
from tests.gcs.multipart import boundary_of, copy_media, read_head
from tests.gcs.objects import Bucket
from tests.gcs.resources import StoredObject
from tests.gcs.service import Service, checked_name, settable
from tests.gcs.sessions import Session
from tests.gcs.staging import StagedFile
from tests.gcs.wire import Request, Response

CHUNK_BYTES = 256 << 10
CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)")


def read_name(request: Request) -> None:
    """Finds out which object an upload is for, reading the beginning of its body if need be."""
    kind = request.query.get("uploadType")
    if request.method != "POST" or "upload_id" in request.query:
        return
    if kind == "multipart":
        boundary = boundary_of(request.headers.get("content-type", ""))
        head = read_head(request.body, boundary)
        request.metadata, request.media_type, request.media_start = head
    elif kind == "resumable":
        request.metadata = request.body.json()
    request.name = str(request.metadata.get("name") or request.name)


def upload(service: Service, request: Request) -> Response:
    """`POST` or `PUT /upload/storage/v1/b/<bucket>/o`."""
    bucket = service.store.bucket(request.bucket)
    kind = request.query.get("uploadType", "media")
    if "upload_id" in request.query:
        return continue_resumable(service, request, bucket)
    if kind == "resumable":
        return start_resumable(service, request, bucket)
    if kind == "multipart":
        return upload_multipart(request, bucket)
    if kind == "media":
        return upload_media(request, bucket)
    raise InvalidRequestError(f"Invalid value for uploadType: {kind!r}")


def upload_media(request: Request, bucket: Bucket) -> Response:
    """The body is the object."""
    name = checked_name(request.name)
    fields: dict[str, Any] = {}
    if "content-type" in request.headers:
        fields["contentType"] = request.headers["content-type"]
    if "contentEncoding" in request.query:
        fields["contentEncoding"] = request.query["contentEncoding"]
    bucket.reserve(name, request.body.length or 0)
    staged = bucket.stage()
    try:
        for block in request.body.blocks():
            staged.write(block)
        return _commit(request, bucket, name, staged, fields, {})
    finally:
        staged.discard()


def upload_multipart(request: Request, bucket: Bucket) -> Response:
    """The body is a JSON resource and the object."""
    boundary = boundary_of(request.headers.get("content-type", ""))
    first = request.media_start
    name = checked_name(request.name)
    fields = settable(request.metadata)
    if request.media_type is not None:
        fields.setdefault("contentType", request.media_type)
    if request.body.length is not None:
        rest = request.body.length - request.body.received + len(first)
        bucket.reserve(name, rest - len(boundary) - 8)
    staged = bucket.stage()
    try:
        copy_media(request.body, boundary, first, staged.write)
        return _commit(request, bucket, name, staged, fields, announced(request.metadata, {}))
    finally:
        staged.discard()


def announced(metadata: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, str]:
    """The checksums that a client gave, in a resource or in headers: base64 by name."""
    found = {}
    for part in headers.get("x-goog-hash", "").split(","):
        name, _, value = part.strip().partition("=")
        if name in ("crc32c", "md5"):
            found[name] = value
    if "content-md5" in headers:
        found["md5"] = headers["content-md5"]
    for key, name in (("crc32c", "crc32c"), ("md5Hash", "md5")):
        if isinstance(metadata.get(key), str):
            found[name] = metadata[key]
    return found


def _commit(
    request: Request,
    bucket: Bucket,
    name: str,
    staged: StagedFile,
    fields: Mapping[str, Any],
    checksums: Mapping[str, str],
) -> Response:
    staged.verify({**announced({}, request.headers), **checksums})
    conditions = Conditions.parse(request.query)
    stored = bucket.commit(name, staged, fields=fields, conditions=conditions)
    return _answer(request, stored)


def _answer(request: Request, stored: StoredObject) -> Response:
    return Response.json(stored.resource(request.base_url), ETag=stored.etag)


def start_resumable(service: Service, request: Request, bucket: Bucket) -> Response:
    """Opens a session; its URL is in `Location`."""
    metadata = request.metadata
    name = checked_name(request.name)
    conditions = Conditions.parse(request.query)
    conditions.check_write(bucket.find(name))
    fields = settable(metadata)
    if "x-upload-content-type" in request.headers:
        fields.setdefault("contentType", request.headers["x-upload-content-type"])
    size = request.headers.get("x-upload-content-length", "0")
    bucket.reserve(name, int(size) if size.isdecimal() else 0)
    session = service.sessions.start(
        bucket, name, fields=fields, conditions=conditions, announced=announced(metadata, {})
    )
    query = urlencode({**request.query, "name": name, "upload_id": session.id})
    location = f"{request.base_url}/upload/storage/v1/b/{quote(bucket.name, safe='')}/o?{query}"
    return Response(headers={"Location": location, "X-GUploader-UploadID": session.id})


@dataclass(frozen=True)
class ContentRange:
    """Where a chunk lies. `start` None: no bytes, a question; `total` None: not known yet."""

    start: int | None
    total: int | None

    @classmethod
    def parse(cls, text: str | None, length: int | None) -> ContentRange:
        """Reads a `Content-Range` header; without one the body is the whole object."""
        if text is None:
            return cls(0, length)
        match = CONTENT_RANGE.fullmatch(text.strip())
        if not match:
            raise InvalidRequestError(f"Failed to parse Content-Range header: {text!r}")
        total = None if match[3] == "*" else int(match[3])
        if match[1] is None:
            return cls(None, total)
        start, end = int(match[1]), int(match[2])
        if end < start or (total is not None and end >= total):
            raise InvalidRequestError(f"Invalid Content-Range header: {text!r}")
        if length is not None and length != end - start + 1:
            raise InvalidRequestError(
                f"Content-Range {text!r} does not fit a body of {length} bytes"
            )
        return cls(start, total)


def continue_resumable(service: Service, request: Request, bucket: Bucket) -> Response:
    """A chunk, a question how far it is (`bytes */N`), or a DELETE that gives up."""
    session = service.sessions.get(bucket, request.query["upload_id"])
    with session.lock:
        if request.method == "DELETE":
            service.sessions.end(session)
            return Response(status=499)
        if session.finished is not None:
            return _answer(request, StoredObject.from_json(session.finished))
        chunked = request.body.length is None
        place = ContentRange.parse(request.headers.get("content-range"), request.body.length)
        total = place.total
        if place.start is not None:
            _receive(request, session, place.start, total)
            if chunked and "content-range" not in request.headers:
                total = session.staged.size
        elif total is None:
            return _progress(session)
        if session.staged.size == total:
            return _finish(service, request, session)
        session.staged.truncate(session.staged.size // CHUNK_BYTES * CHUNK_BYTES)
        return _progress(session)


def _receive(request: Request, session: Session, start: int, total: int | None) -> None:
    """Appends a chunk; bytes that arrived before are passed over."""
    staged = session.staged
    if start > staged.size:
        raise ApiError(
            503,
            "backendError",
            "Invalid request. According to the Content-Range header, the upload offset is "
            f"{start} byte(s), which exceeds already uploaded size of {staged.size} byte(s).",
        )
    expected = total if total is not None else start + (request.body.length or 0)
    session.bucket.reserve(session.name, expected)
    position = start
    try:
        for block in request.body.blocks():
            known = staged.size - position
            position += len(block)
            if known < len(block):
                staged.write(block[known:] if known > 0 else block)
    except ConnectionLostError:
        staged.truncate(staged.size // CHUNK_BYTES * CHUNK_BYTES)
        raise
    if total is not None and staged.size > total:
        size = staged.size
        staged.truncate(0)
        raise InvalidRequestError(f"{size} bytes uploaded where Content-Range says {total}")


def _progress(session: Session) -> Response:
    headers = {"X-GUploader-UploadID": session.id}
    if session.staged.size:
        headers["Range"] = f"bytes=0-{session.staged.size - 1}"
    return Response(status=308, headers=headers)


def _finish(service: Service, request: Request, session: Session) -> Response:
    try:
        session.staged.verify({**session.announced, **announced({}, request.headers)})
        stored = session.bucket.commit(
            session.name, session.staged, fields=session.fields, conditions=session.conditions
        )
    except (PreconditionError, InvalidRequestError):
        service.sessions.end(session)
        raise
    except ApiError:  # over the quota: the client may try again later
        session.close()
        raise
    session.finished = stored.to_json()
    session.drop_bytes()
    session.save()
    return _answer(request, stored)
