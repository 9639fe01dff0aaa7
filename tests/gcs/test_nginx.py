"""What the double does for a server in front, and the comparison of their answers."""

from pathlib import Path

import pytest

from benchmarks import storage
from tests.gcs.downloads import media_headers
from tests.gcs.handler import IN_FRONT_BYTES
from tests.gcs.nginx import CONFIGURATION, KEPT
from tests.gcs.nginx_check import BUCKET, Question, asked, ensure_same
from tests.gcs.resources import StoredObject
from tests.gcs.server import GcsServer

OF_NGINX = {"Content-Type", "Accept-Ranges", "Cache-Control", "Content-Disposition"}
"""It hands these on by itself, or makes them as they must be."""


def test_a_server_in_front_is_told_where_the_bytes_of_a_large_answer_lie(gcs):
    content = bytes(IN_FRONT_BYTES + 9)
    path = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=media&name=large"
    asked(gcs.server.url, Question("POST", path, {}, content))
    place = f"/storage/v1/b/{gcs.bucket}/o/large?alt=media"
    for given in ({}, {"Range": "bytes=5-"}):
        whole = asked(gcs.server.url, Question("GET", place, given))
        told = asked(gcs.server.url, Question("GET", place, given | {"X-Accel": "yes"}))
        file = Path(told.headers["x-accel-redirect"]).relative_to("/_stored")
        assert (gcs.server.root / file).read_bytes() == content
        assert (told.status, told.body) == (200, b"")
        assert told.headers["x-goog-generation"] == whole.headers["x-goog-generation"]
    few = asked(gcs.server.url, Question("GET", place, {"Range": "bytes=0-9", "X-Accel": "yes"}))
    assert (few.status, few.body) == (206, bytes(10))


def test_every_header_of_a_download_is_kept_by_the_server_in_front():
    fields = dict.fromkeys(("contentEncoding", "cacheControl", "contentDisposition"), "x")
    now = "2026-01-01T00:00:00Z"
    stored = StoredObject("b", "n", 1, 1, 1, "crc", "md5", now, now, fields=fields)
    assert set(media_headers(stored)) - OF_NGINX == set(KEPT)
    assert "location /_stored/" in CONFIGURATION


def test_answers_are_compared_and_the_bucket_for_that_is_gone(gcs, tmp_path):
    server = gcs.server
    assert ensure_same(server.url, server.url, server.store) > 100
    with GcsServer(tmp_path) as other, pytest.raises(RuntimeError, match="expected 200, found"):
        ensure_same(other.url, server.url, server.store)
    assert BUCKET not in [bucket.name for bucket in server.store.buckets()]


def test_what_differs_is_named_with_both_answers(gcs, tmp_path):
    with GcsServer(tmp_path) as other:
        other.store.create_bucket(BUCKET)
        with pytest.raises(RuntimeError, match=r"'GET', .*: expected \(200, .*, found \(200, "):
            ensure_same(other.url, gcs.server.url, gcs.server.store)


def test_a_server_in_front_is_asked_for_with_a_bucket_only(capsys):
    with pytest.raises(SystemExit):
        storage.main(["--server", "nginx"])
    assert "--server nginx: a disk has none; give --store gcs" in capsys.readouterr().err
