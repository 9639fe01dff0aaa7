"""Which handler answers which path."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import unquote

from tests.gcs import admin, copies, downloads, metadata, uploads
from tests.gcs.service import Service
from tests.gcs.wire import Request, Response

Handler = Callable[[Service, Request], Response]


@dataclass(frozen=True)
class Match:
    """A found route: the operation's name, who carries it out, and what the path says."""

    operation: str
    handler: Handler
    parameters: dict[str, str]


_API = r"(?:/storage/v1)"
_BUCKET = _API + r"/b/(?P<bucket>[^/]+)"
_OBJECT = _BUCKET + r"/o/(?P<name>[^/]+)"
_TARGET = r"/b/(?P<target_bucket>[^/]+)/o/(?P<target_name>[^/]+)"
_UPLOAD = r"(?:/resumable)?/upload/storage/v1/b/(?P<bucket>[^/]+)/o"

# (method, path, media or not or either, operation, handler)
_TABLE: list[tuple[str, str, bool | None, str, Handler]] = [
    ("GET", _API + r"/b", None, "buckets.list", metadata.list_buckets),
    ("POST", _API + r"/b", None, "buckets.create", metadata.create_bucket),
    ("GET", _BUCKET, None, "buckets.get", metadata.get_bucket),
    ("PATCH", _BUCKET, None, "buckets.patch", metadata.patch_bucket),
    ("DELETE", _BUCKET, None, "buckets.delete", metadata.delete_bucket),
    ("GET", _BUCKET + "/storageLayout", None, "buckets.layout", metadata.get_layout),
    ("GET", _BUCKET + "/o", None, "objects.list", metadata.list_objects),
    ("GET", _OBJECT, True, "media.get", downloads.get_media),
    ("GET", _OBJECT, False, "objects.get", metadata.get_object),
    ("PATCH", _OBJECT, None, "objects.patch", metadata.patch_object),
    ("PUT", _OBJECT, None, "objects.update", metadata.update_object),
    ("DELETE", _OBJECT, None, "objects.delete", metadata.delete_object),
    ("POST", _OBJECT + "/compose", None, "objects.compose", copies.compose),
    ("POST", _OBJECT + "/copyTo" + _TARGET, None, "objects.copy", copies.copy),
    ("POST", _OBJECT + "/rewriteTo" + _TARGET, None, "objects.rewrite", copies.rewrite),
    (
        "POST",
        _OBJECT + r"/moveTo/o/(?P<target_name>[^/]+)",
        None,
        "objects.move",
        copies.move,
    ),
    ("GET", "/download" + _OBJECT, None, "media.get", downloads.get_media),
    ("POST", _UPLOAD, None, "upload", uploads.upload),
    ("PUT", _UPLOAD, None, "upload", uploads.upload),
    ("DELETE", _UPLOAD, None, "upload.cancel", uploads.upload),
    ("GET", "/_double", None, "admin", admin.show),
    ("POST", "/_double/faults", None, "admin", admin.add_fault),
    ("DELETE", "/_double/faults", None, "admin", admin.clear_faults),
    ("DELETE", r"/_double/faults/(?P<fault>\d+)", None, "admin", admin.remove_fault),
    ("POST", r"/_double/faults/(?P<fault>\d+)/release", None, "admin", admin.release_fault),
    ("PUT", "/_double/quota", None, "admin", admin.set_quota),
    ("GET", r"/(?!_double|storage/|upload/|download/)(?P<bucket>[^/]+)/(?P<name>.+)",
     None, "media.get", downloads.get_media),
]  # fmt: skip
_ROUTES = [
    (method, re.compile(path), media, operation, handler)
    for method, path, media, operation, handler in _TABLE
]


def find(method: str, path: str, *, media: bool) -> Match | None:
    """The route of a request; `path` still percent-encoded, as names may hold slashes.

    Args:
        method: HTTP method; HEAD is routed like GET.
        path: without the query.
        media: whether the query says `alt=media`.
    """
    method = "GET" if method == "HEAD" else method
    for route_method, pattern, wants_media, operation, handler in _ROUTES:
        if method != route_method or wants_media not in (None, media):
            continue
        if match := pattern.fullmatch(path):
            parameters = {key: unquote(value) for key, value in match.groupdict().items()}
            return Match(operation, handler, parameters)
    return None
