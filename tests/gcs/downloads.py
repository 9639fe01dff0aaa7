"""Reading an object's bytes: whole or a range, with version and checksums in the headers."""

from __future__ import annotations

import re
from datetime import datetime
from email.utils import format_datetime

from tests.gcs.conditions import Conditions
from tests.gcs.errors import ApiError
from tests.gcs.resources import StoredObject
from tests.gcs.service import Service, generation
from tests.gcs.wire import Request, Response

RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def media_headers(stored: StoredObject) -> dict[str, str]:
    """The headers of a download."""
    hashes = f"crc32c={stored.crc32c}" + (f",md5={stored.md5}" if stored.md5 else "")
    updated = datetime.fromisoformat(stored.updated)
    headers = {
        "Content-Type": stored.content_type,
        "ETag": f'"{stored.etag}"',
        "Last-Modified": format_datetime(updated, usegmt=True),
        "Accept-Ranges": "bytes",
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": str(stored.metageneration),
        "x-goog-hash": hashes,
        "x-goog-storage-class": str(stored.fields.get("storageClass", "STANDARD")),
        "x-goog-stored-content-encoding": str(stored.fields.get("contentEncoding", "identity")),
        "x-goog-stored-content-length": str(stored.size),
    }
    for key, name in (
        ("contentEncoding", "Content-Encoding"),
        ("cacheControl", "Cache-Control"),
        ("contentDisposition", "Content-Disposition"),
    ):
        if key in stored.fields:
            headers[name] = str(stored.fields[key])
    return headers


def parse_range(text: str | None, size: int) -> tuple[int, int] | None:
    """The range a client asks for, as (first byte, byte after the last); None: all of it.

    A malformed header is ignored, as HTTP says.

    Raises:
        ApiError: 416, if no byte of it exists.
    """
    match = RANGE.fullmatch(text.strip()) if text else None
    if match is None or not (match[1] or match[2]):
        return None
    if match[1]:
        start = int(match[1])
        stop = min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < start:
            return None
    else:
        start, stop = max(size - int(match[2]), 0), size
    if start >= stop:
        message = f"The requested range cannot be satisfied: {text} of {size} bytes."
        raise ApiError(416, "requestedRangeNotSatisfiable", message)
    return start, stop


def get_media(service: Service, request: Request) -> Response:
    """`GET ...?alt=media`, the download host's path, and `GET /<bucket>/<object>`."""
    bucket = service.store.bucket(request.bucket)
    conditions = Conditions.parse(request.query)
    stored, file = bucket.open(request.name, generation(request.query), conditions)
    try:
        asked = parse_range(request.headers.get("range"), stored.size)
    except ApiError:
        file.close()
        raise
    headers = media_headers(stored)
    start, stop = asked or (0, stored.size)
    if asked is not None:
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{stored.size}"
    status = 200 if asked is None else 206
    return Response(status, headers, file=file, offset=start, count=stop - start)
