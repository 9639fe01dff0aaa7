"""Does a server in front of the double give the double's answers, to what clients ask of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tests.gcs.store import Store

BUCKET = "in-front"
NAMES = ("small", "large/value", "a b%2F+ü")
SIZES = (700, 3 << 20, 100_000)
OF_THE_CONNECTION = {"date", "server", "connection", "keep-alive", "transfer-encoding"}


class Question(NamedTuple):
    """A request."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


class Answer(NamedTuple):
    """What came: headers by small letters, without those of the connection."""

    status: int
    headers: dict[str, str]
    body: bytes


def ensure_same(front: str, double: str, store: Store) -> int:
    """Asks both, of objects in a bucket that is removed again; how many questions were asked.

    Args:
        front: URL of the server in front.
        double: URL of the double.
        store: the double's.

    Raises:
        RuntimeError: they differ: the question, and both answers.
    """
    store.create_bucket(BUCKET)
    try:
        contents = [bytes(range(251)) * (size // 251) for size in SIZES]
        for name, content in zip(NAMES, contents, strict=True):
            path = f"/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={quote(name, safe='')}"
            _expect(200, front, Question("POST", path, {}, content))
        _upload_in_parts(front, contents[1])
        questions = list(_questions(store))
        for question in questions:
            found, wanted = asked(front, question), asked(double, question)
            if found != wanted:
                shown = [(one.status, one.headers, len(one.body)) for one in (wanted, found)]
                raise RuntimeError(f"{question[:3]}: expected {shown[0]}, found {shown[1]}")
    finally:
        store.delete_bucket(BUCKET, force=True)
    return len(questions)


def _upload_in_parts(front: str, content: bytes) -> None:
    """One object more, by a session that the server in front begins."""
    begun = asked(
        front,
        Question("POST", f"/upload/storage/v1/b/{BUCKET}/o?uploadType=resumable&name=parts", {}),
    )
    session = begun.headers["location"]
    if not session.startswith(front):
        raise RuntimeError(f"expected a session at {front}, found {session}")
    parts = urlsplit(session)
    half = len(content) // 2 >> 18 << 18
    for start, stop, end, status in (
        (0, half, "*", 308),
        (half, len(content), len(content), 200),
    ):
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{end}"}
        path = f"{parts.path}?{parts.query}"
        _expect(status, front, Question("PUT", path, place, content[start:stop]))


def _questions(store: Store) -> Iterator[Question]:
    for stored in store.bucket(BUCKET).all():
        name = quote(stored.name, safe="")
        paths = [
            f"/storage/v1/b/{BUCKET}/o/{name}?alt=media",
            f"/download/storage/v1/b/{BUCKET}/o/{name}?alt=media",
            f"/{BUCKET}/{quote(stored.name)}",
        ]
        last = stored.size - 1
        ranges = ("", "0-9", f"5-{last}", "100-99999", f"{last}-", "-70000", f"7-{last + 9}")
        for path in paths:
            for given in (*ranges, f"{last + 1}-", "3-2"):
                yield Question("GET", path, {"Range": f"bytes={given}"} if given else {})
            yield Question("HEAD", path, {})
        generation = stored.generation
        for condition in ("ifGenerationMatch", "ifGenerationNotMatch"):
            for number in (generation, generation + 1):
                yield Question("GET", f"{paths[0]}&{condition}={number}", {})
        yield Question("GET", f"{paths[0]}&generation={generation}", {"Range": "bytes=0-"})
    yield Question("GET", f"/storage/v1/b/{BUCKET}/o/none?alt=media", {})
    yield Question("GET", f"/storage/v1/b/{BUCKET}/o?fields=items(name,size,crc32c)", {})


def _expect(status: int, url: str, question: Question) -> None:
    found = asked(url, question)
    if found.status != status:
        raise RuntimeError(f"{question[:3]}: expected {status}, found {found}")


def asked(url: str, question: Question) -> Answer:
    """What a server answers; its own address in it is left out."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        method, path, headers, body = question
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if answer.headers.get_content_type() == "application/json":
            content = json.dumps(json.loads(content)).replace(url, "").encode()
        told = {name.lower(): value for name, value in answer.headers.items()}
        if answer.headers.get_content_type() == "application/json":
            told.pop("content-length", None)
        kept = {name: value for name, value in told.items() if name not in OF_THE_CONNECTION}
        return Answer(answer.status, kept, content)
    finally:
        connection.close()
