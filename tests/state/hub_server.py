"""As much of the Hugging Face hub as downloading and uploading one repository needs."""

from __future__ import annotations

import base64
import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMIT = "a" * 40
REVISIONS = (COMMIT, "main", "v1")


class Hub:
    """The repository org/tiny; what is pushed lies in `pushed`, by file name.

    Every GET and HEAD of a file is in `asked`: method, revision and name; every token in `tokens`.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.pushed: dict[str, bytes] = {}
        self.messages: list[str] = []
        self.asked: list[tuple[str, str, str]] = []
        self.tokens: set[str | None] = set()

    @property
    def downloaded(self) -> list[str]:
        """The names of the files that were downloaded, in that order."""
        return [name for method, _, name in self.asked if method == "GET"]

    def get(self, path: str, method: str = "GET") -> tuple[bytes | None, dict[str, str]]:
        """The answer to GET, None for 404, and its headers."""
        listing = re.fullmatch(r"/api/models/org/tiny(?:/(tree|revision)/([^/]+))?", path)
        if listing is not None:
            if listing[2] not in (None, *REVISIONS):
                return None, {"X-Error-Code": "RevisionNotFound"}
            return self._listing(tree=listing[1] == "tree"), {}
        named = re.fullmatch(r"/org/tiny/resolve/([^/]+)/(.+)", path)
        if named is not None and named[1] in REVISIONS:
            self.asked.append((method, named[1], named[2]))
            file = self.folder / named[2]
            if file.is_file():
                return file.read_bytes(), {"X-Repo-Commit": COMMIT, "ETag": f'"{file.name}"'}
            return None, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
        return None, {}

    def post(self, path: str, body: bytes) -> Any:
        """The answer to POST, None for 404."""
        if path == "/api/repos/create":
            return {"url": f"{self.url}/org/{json.loads(body)['name']}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            return {"files": modes}
        if "/commit/" in path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "header":
                    self.messages.append(value["summary"])
                else:
                    self.pushed[value["path"]] = base64.b64decode(value["content"])
            url = f"{self.url}/org/tiny/commit/{COMMIT}"
            return {"commitUrl": url, "commitOid": COMMIT, "success": True}
        return None

    def _listing(self, *, tree: bool) -> bytes:
        files = {
            file.relative_to(self.folder).as_posix(): file.stat().st_size
            for file in sorted(self.folder.rglob("*"))
            if file.is_file()
        }
        if tree:
            rows = [{"path": name, "size": size, "oid": COMMIT} for name, size in files.items()]
            return json.dumps([{"type": "file", **row} for row in rows]).encode()
        names = [{"rfilename": name} for name in files]
        info = {"id": "org/tiny", "sha": COMMIT, "siblings": names, "private": False}
        return json.dumps(info).encode()


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """A hub on a port of this machine, that serves `folder` as org/tiny."""
    hub: Hub

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            hub.tokens.add(self.headers.get("Authorization"))
            body, headers = hub.get(unquote(self.path.partition("?")[0]), self.command)
            self._answer(body, headers)

        def do_POST(self) -> None:
            path = unquote(self.path.partition("?")[0])
            made = hub.post(path, self._body())
            self._answer(None if made is None else json.dumps(made).encode(), {})

        def _body(self) -> bytes:
            if "Content-Length" in self.headers:
                return self.rfile.read(int(self.headers["Content-Length"]))
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def _answer(self, body: bytes | None, headers: dict[str, str]) -> None:
            self.send_response(404 if body is None else 200)
            content = body or b""
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            """Says nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(folder, f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
