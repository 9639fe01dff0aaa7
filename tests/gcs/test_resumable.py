"""The resumable protocol, byte for byte: offsets, questions, repeats, and giving up."""

import json
import os

import pytest

KIB256 = 256 << 10


class Session:
    """A resumable upload over one raw connection."""

    def __init__(self, connection, bucket, name, query=""):
        self.connection = connection
        status, headers, body = self.send(
            "POST",
            f"/upload/storage/v1/b/{bucket}/o?uploadType=resumable&name={name}{query}",
            b"{}",
        )
        assert status == 200, body
        self.path = headers["Location"].split("/", 3)[3]

    def send(self, method, path, body=b"", headers=None):
        self.connection.request(method, path, body, headers or {})
        answer = self.connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()

    def chunk(self, data, content_range):
        return self.send("PUT", "/" + self.path, data, {"Content-Range": content_range})

    def question(self, total="*"):
        return self.chunk(b"", f"bytes */{total}")


@pytest.fixture
def start(gcs, http_connection):
    return lambda name, query="": Session(http_connection, gcs.bucket, name, query)


def test_nothing_is_visible_until_the_last_chunk(gcs, start):
    data = os.urandom(2 * KIB256 + 5)
    session = start("object")
    status, headers, _ = session.question()
    assert (status, headers.get("Range")) == (308, None)
    status, headers, _ = session.chunk(data[:KIB256], f"bytes 0-{KIB256 - 1}/*")
    assert (status, headers["Range"]) == (308, f"bytes=0-{KIB256 - 1}")
    assert gcs.names() == []
    status, _, body = session.chunk(data[KIB256:], f"bytes {KIB256}-{len(data) - 1}/{len(data)}")
    assert (status, json.loads(body)["size"]) == (200, str(len(data)))
    assert gcs.file("object").read_bytes() == data


def test_chunk_that_is_no_multiple_of_256_kib_is_kept_in_part(start):
    session = start("object")
    data = bytes(KIB256 + 100)
    _, headers, _ = session.chunk(data, f"bytes 0-{len(data) - 1}/*")
    assert headers["Range"] == f"bytes=0-{KIB256 - 1}"


def test_overlapping_chunk_counts_its_bytes_once(gcs, start):
    data = os.urandom(3 * KIB256)
    session = start("object")
    session.chunk(data[: 2 * KIB256], f"bytes 0-{2 * KIB256 - 1}/*")
    status, _, _ = session.chunk(data[KIB256:], f"bytes {KIB256}-{len(data) - 1}/{len(data)}")
    assert status == 200
    assert gcs.file("object").read_bytes() == data


def test_chunk_beyond_what_arrived_is_refused(start):
    session = start("object")
    status, _, body = session.chunk(b"x", "bytes 5-5/6")
    assert status == 503
    assert b"exceeds already uploaded size" in body


def test_finished_upload_answers_the_same_object_again(start):
    session = start("object")
    _, _, first = session.chunk(b"12345", "bytes 0-4/5")
    for total in ("*", "5"):
        status, _, again = session.question(total)
        assert (status, json.loads(again)["generation"]) == (200, json.loads(first)["generation"])


def test_empty_object_is_finished_by_a_question_with_its_size(gcs, start):
    status, _, _ = start("empty").question("0")
    assert status == 200
    assert gcs.file("empty").read_bytes() == b""


def test_cancelled_upload_leaves_nothing(gcs, start):
    session = start("object")
    session.chunk(bytes(KIB256), f"bytes 0-{KIB256 - 1}/*")
    assert session.send("DELETE", "/" + session.path)[0] == 499
    assert session.question()[0] == 404
    staging = gcs.server.store.bucket(gcs.bucket).folder.staging
    assert list(staging.iterdir()) == []


def test_condition_that_fails_already_is_refused_at_the_start(gcs, start, http_connection):
    start("object").chunk(b"1", "bytes 0-0/1")
    path = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=resumable&name=object"
    http_connection.request("POST", f"{path}&ifGenerationMatch=0", b"{}")
    answer = http_connection.getresponse()
    assert (answer.status, b"ifGenerationMatch" in answer.read()) == (412, True)


@pytest.mark.parametrize("text", ["bytes 5-2/9", "bytes 0-9/5", "0-1/2", "bytes 0-3/9"])
def test_impossible_content_range_is_a_bad_request(start, text):
    assert start("object").chunk(b"12", text)[0] == 400


def test_chunked_transfer_encoding_is_read_to_its_end(gcs, start):
    data = os.urandom(700_000)
    session = start("object")
    session.connection.request(
        "PUT",
        "/" + session.path,
        (data[index : index + 1000] for index in range(0, len(data), 1000)),
        encode_chunked=True,
        headers={"Transfer-Encoding": "chunked"},
    )
    answer = session.connection.getresponse()
    assert (answer.status, json.loads(answer.read())["size"]) == (200, "700000")
    assert gcs.file("object").read_bytes() == data
