"""The S3 double as a server: the store, the faults and the connections of `tests.gcs`, in XML."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import unquote

from tests.gcs.errors import ApiError
from tests.gcs.handler import Handler
from tests.gcs.routes import Match
from tests.gcs.server import GcsServer
from tests.gcs.service import Service
from tests.gcs.wire import Body, Request, Response
from tests.s3 import objects
from tests.s3.errors import S3Error, refusal
from tests.s3.multipart import Uploads

SETTINGS = {"versioning": "<VersioningConfiguration/>", "object-lock": "", "lifecycle": ""}
"""Settings of a bucket, and what is answered where a test has set nothing; "": there is none."""

_CONDITIONS = re.compile(r"(x-amz-copy-source-)?if-(none-)?match")


def client_environment(url: str) -> dict[str, str]:
    """Return the variables that send clients of S3 to a double.

    Args:
        url: "http://host:port".
    """
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


class S3Server(GcsServer):
    """A double of S3 on a loopback port; a context manager. See `GcsServer`.

    Attributes:
        uploads: uploads in parts that nobody has completed or aborted.
        settings: XML of a bucket's setting, by bucket and name, as in `SETTINGS`.
    """

    def __init__(self, root: Path, listener: socket.socket | None = None) -> None:
        super().__init__(root, listener)
        self.uploads = Uploads()
        self.settings: dict[tuple[str, str], str] = {}

    def _connect(self, connection: socket.socket, address: tuple[str, int]) -> None:
        _S3Connection(connection, address, self)


class _S3Connection(Handler):
    """A connection that speaks the REST API of S3, with the bucket in the path."""

    server_version = "s3-double"
    host: S3Server

    def __init__(self, connection: socket.socket, address: tuple[str, int], host: S3Server) -> None:
        self.host = host
        super().__init__(connection, address, host)

    def _parse(self) -> tuple[Request, Match | None]:
        path, query, headers, length = self._head()
        bucket, _, name = unquote(path).lstrip("/").partition("/")
        route = self._route(self.command, name, query, headers)
        request = Request(
            method=self.command,
            operation=route[0] if route else "unknown",
            bucket=bucket,
            name=name or query.get("prefix", ""),
            parameters={},
            query=query,
            headers=headers,
            body=Body(self.rfile, self.connection, length),
            base_url="",
        )
        return request, Match(route[0], route[1], {}) if route else None

    def _route(
        self, method: str, name: str, query: Mapping[str, str], headers: Mapping[str, str]
    ) -> tuple[str, Callable[[Service, Request], Response]] | None:
        uploads = self.host.uploads
        copies = "x-amz-copy-source" in headers
        if not name:
            match method:
                case "HEAD":
                    return "buckets.get", _head_bucket
                case "GET" if "location" in query:
                    return "buckets.location", _location
                case "GET" if setting := SETTINGS.keys() & query.keys():
                    return "buckets.setting", partial(_setting, self.host, *setting)
                case "GET" if "uploads" in query:
                    return "uploads.list", uploads.list_open
                case "GET":
                    return "objects.list", objects.list_objects
                case "POST" if "delete" in query:
                    return "objects.delete", objects.delete_many
            return None
        match method:
            case "PUT" if "partNumber" in query:
                return "uploads.copy" if copies else "uploads.put", uploads.put_part
            case "PUT" if copies:
                return "objects.copy", objects.copy
            case "PUT":
                return "objects.put", objects.put
            case "HEAD":
                return "objects.get", objects.get
            case "GET":
                return "media.get", objects.get
            case "POST" if "uploads" in query:
                return "uploads.begin", uploads.begin
            case "POST" if "uploadId" in query:
                return "uploads.complete", uploads.complete
            case "DELETE" if "uploadId" in query:
                return "uploads.abort", uploads.abort
            case "DELETE":
                return "objects.delete", objects.delete
        return None

    def _unconditional(self, request: Request) -> Request:
        headers = request.headers.items()
        kept = {name: text for name, text in headers if not _CONDITIONS.fullmatch(name)}
        return replace(request, headers=kept)

    def _refusal(self, error: ApiError, request: Request) -> Response:
        return refusal(error, f"/{request.bucket}/{request.name}")


def _setting(host: S3Server, name: str, service: Service, request: Request) -> Response:
    service.store.bucket(request.bucket)
    text = host.settings.get((request.bucket, name), SETTINGS[name])
    if not text:
        raise S3Error(404, "NoSuchConfiguration")
    return objects.xml(text)


def _head_bucket(service: Service, request: Request) -> Response:
    service.store.bucket(request.bucket)
    return Response(200, {"x-amz-bucket-region": "us-east-1"})


def _location(service: Service, request: Request) -> Response:
    service.store.bucket(request.bucket)
    return objects.xml("<LocationConstraint>us-east-1</LocationConstraint>")
