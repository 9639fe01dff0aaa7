"""Plain HTTP: ranges, headers, the XML-style path, multipart bodies, errors, keep-alive."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gcs.conditions import Conditions
from tests.gcs.errors import ApiError, NotModifiedError, PreconditionError
from tests.gcs.listing import Query, decode_token, list_page
from tests.gcs.resources import StoredBucket


def ask(connection, method, path, body=b"", headers=None):
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    return answer.status, dict(answer.headers), answer.read()


@pytest.fixture
def put(gcs, http_connection):
    def put(name, data, query=""):
        path = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=media&name={name}{query}"
        status, _, body = ask(http_connection, "POST", path, data)
        return status, json.loads(body)

    return put


def test_every_download_path_gives_bytes_version_and_checksum(gcs, http_connection, put):
    _, resource = put("a%2Fb", b"payload")
    for path in (
        f"/storage/v1/b/{gcs.bucket}/o/a%2Fb?alt=media",
        f"/download/storage/v1/b/{gcs.bucket}/o/a%2Fb?alt=media",
        f"/{gcs.bucket}/a/b",
    ):
        status, headers, body = ask(http_connection, "GET", path)
        assert (status, body) == (200, b"payload")
        assert headers["x-goog-generation"] == resource["generation"]
        assert f"crc32c={resource['crc32c']}" in headers["x-goog-hash"]
        status, headers, body = ask(http_connection, "HEAD", path)
        assert (status, headers["Content-Length"], body) == (200, "7", b"")


@pytest.mark.parametrize(
    ("text", "status", "body"),
    [
        ("bytes=0-2", 206, b"012"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-3", 206, b"789"),
        ("bytes=-30", 206, b"0123456789"),
        ("bytes=5-100", 206, b"56789"),
        ("bytes=5-2", 200, b"0123456789"),
        ("lines=1-2", 200, b"0123456789"),
    ],
)
def test_range_header(gcs, http_connection, put, text, status, body):
    put("digits", b"0123456789")
    found = ask(http_connection, "GET", f"/{gcs.bucket}/digits", headers={"Range": text})
    assert (found[0], found[2]) == (status, body)


def test_range_behind_the_end_is_416(gcs, http_connection, put):
    put("digits", b"0123456789")
    put("empty", b"")
    for name, text in (("digits", "bytes=10-"), ("empty", "bytes=0-0")):
        found = ask(http_connection, "GET", f"/{gcs.bucket}/{name}", headers={"Range": text})
        assert found[0] == 416


def test_not_modified_has_no_body_and_keeps_the_connection(gcs, http_connection, put):
    _, resource = put("object", b"payload")
    path = f"/storage/v1/b/{gcs.bucket}/o/object?alt=media"
    query = f"&ifGenerationNotMatch={resource['generation']}"
    assert ask(http_connection, "GET", path + query)[::2] == (304, b"")
    assert ask(http_connection, "GET", path)[::2] == (200, b"payload")


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("media", [b"", b"x", b"\r\n", b"\n--b", b"--b--", bytes(3 << 20)])
def test_multipart_media_is_taken_to_the_byte(gcs, http_connection, end, media):
    head = f'--b{end}Content-Type: application/json{end}{end}{{"name": "object"}}{end}--b{end}'
    part = f"Content-Type: text/x-test{end}{end}"
    body = (head + part).encode() + media + f"{end}--b--{end}".encode()
    status, _, answer = ask(
        http_connection,
        "POST",
        f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=multipart",
        body,
        {"Content-Type": "multipart/related; boundary=b"},
    )
    assert (status, json.loads(answer)["contentType"]) == (200, "text/x-test")
    assert gcs.file("object").read_bytes() == media


def test_multipart_without_its_end_stores_nothing(gcs, http_connection):
    body = b'--b\r\n\r\n{"name": "object"}\r\n--b\r\n\r\nhalf of the by'
    path = f"/upload/storage/v1/b/{gcs.bucket}/o?uploadType=multipart"
    headers = {"Content-Type": "multipart/related; boundary=b"}
    assert ask(http_connection, "POST", path, body, headers)[0] == 400
    assert gcs.names() == []


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/storage/v1/b/{bucket}/o/none", 404),
        ("GET", "/storage/v1/b/no-such-bucket/o", 404),
        ("GET", "/storage/v1/nonsense", 404),
        ("POST", "/upload/storage/v1/b/{bucket}/o?uploadType=media", 400),
        ("POST", "/upload/storage/v1/b/{bucket}/o?uploadType=other&name=x", 400),
        ("POST", "/upload/storage/v1/b/{bucket}/o?name=x&ifGenerationMatch=y", 400),
        ("GET", "/storage/v1/b/{bucket}/o?maxResults=no", 400),
        ("GET", "/storage/v1/b/{bucket}/o?pageToken=%21", 400),
        ("DELETE", "/storage/v1/b/{bucket}/o/none", 404),
    ],
)  # fmt: skip
def test_refusals_are_google_json_and_keep_the_connection(
    gcs, http_connection, method, path, status
):
    for _ in range(2):
        found, _, body = ask(http_connection, method, path.format(bucket=gcs.bucket), b"{}")
        assert (found, json.loads(body)["error"]["code"]) == (status, status)


@pytest.mark.parametrize("exists", [True, False])
@pytest.mark.parametrize("matches", [True, False])
def test_conditions_on_writes_follow_the_table(exists, matches):
    current = StoredBucket("b", 7, 2, "", "") if exists else None
    generation = (7 if exists else 0) if matches else 5

    def refused(**conditions):
        try:
            Conditions(**conditions).check_write(current)
        except PreconditionError:
            return True
        return False

    assert refused(generation_match=generation) is not matches
    assert refused(generation_not_match=generation) is matches
    assert refused() is False


def test_conditions_on_reads_say_not_modified_before_precondition_failed():
    current = StoredBucket("b", 7, 2, "", "")
    with pytest.raises(NotModifiedError):
        Conditions(generation_not_match=7, generation_match=5).check_read(current)
    with pytest.raises(PreconditionError):
        Conditions(metageneration_match=1).check_read(current)
    with pytest.raises(ApiError, match="Invalid value for ifGenerationMatch"):
        Conditions.parse({"ifGenerationMatch": "-1"})


NAMES = st.lists(st.text("ab/é", min_size=1, max_size=5), max_size=20, unique=True)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    names=NAMES,
    prefix=st.text("ab/", max_size=3),
    delimiter=st.sampled_from(["", "/", "ab"]),
    start=st.text("ab/", max_size=2),
    end=st.text("ab/", max_size=2),
    size=st.integers(1, 5),
)
def test_pages_together_list_each_match_once_in_order(
    gcs, names, prefix, delimiter, start, end, size
):
    bucket = gcs.server.store.bucket(gcs.bucket)
    for name in gcs.names():
        bucket.delete(name)
    for name in names:
        staged = bucket.stage()
        bucket.commit(name, staged, fields={})
    items, prefixes, after = [], [], None
    while True:
        page = list_page(bucket, Query(prefix, delimiter, start, end, after=after, limit=size))
        assert len(page.items) + len(page.prefixes) <= size
        items += [stored.name for stored in page.items]
        prefixes += page.prefixes
        if page.next_token is None:
            break
        after = decode_token(page.next_token)

    expected_items, expected_prefixes = [], []
    for name in sorted(names):
        if not name.startswith(prefix) or name < start or (end and name >= end):
            continue
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        if cut < 0:
            expected_items.append(name)
        elif name[: cut + len(delimiter)] not in expected_prefixes:
            expected_prefixes.append(name[: cut + len(delimiter)])
    assert items == expected_items
    assert prefixes == expected_prefixes
