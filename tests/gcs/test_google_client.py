"""Google's own client library finds what it expects of Google Cloud Storage."""

import base64
import os

import google_crc32c
import pytest
from google.api_core.exceptions import BadRequest, Conflict, NotFound, PreconditionFailed
from google.cloud import storage
from google.cloud.exceptions import NotModified

AWKWARD_NAMES = ["a b", "a+b", "a%2Fb", "a?b#c&d=e", "ü/日本/🙂", "x//y", ".hidden", "q/~'()*!"]


def crc32c(data: bytes) -> str:
    return base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()


def test_small_upload_comes_back_with_its_version_and_checksum(bucket):
    data = os.urandom(1000)
    blob = bucket.blob("folder/small.bin")
    blob.upload_from_string(data, content_type="text/x-test")
    assert blob.crc32c == crc32c(data)
    assert blob.size == 1000
    found = bucket.get_blob("folder/small.bin")
    assert (found.generation, found.content_type) == (blob.generation, "text/x-test")
    assert found.download_as_bytes() == data
    assert found.md5_hash is not None
    assert bucket.get_blob("folder") is None


@pytest.mark.parametrize("name", AWKWARD_NAMES)
def test_names_survive_every_encoding(bucket, client, name):
    bucket.blob(name).upload_from_string(name.encode())
    assert bucket.blob(name).download_as_bytes() == name.encode()
    assert [blob.name for blob in client.list_blobs(bucket)] == [name]
    bucket.copy_blob(bucket.blob(name), bucket, name + "-copy")
    bucket.delete_blobs([name, name + "-copy"])
    assert list(client.list_blobs(bucket)) == []


@pytest.mark.parametrize("size", [0, 1, 256 << 10, (1 << 20) + 1, 9 << 20])
def test_resumable_upload_in_chunks_keeps_every_byte(gcs, bucket, tmp_path, size):
    data = os.urandom(size)
    (tmp_path / "file").write_bytes(data)
    blob = bucket.blob("large.bin", chunk_size=256 << 10 if size < 2 << 20 else 2 << 20)
    blob.upload_from_filename(tmp_path / "file")
    assert (blob.size, blob.crc32c) == (size, crc32c(data))
    assert bucket.blob("large.bin").download_as_bytes() == data
    assert gcs.file("large.bin").read_bytes() == data


def test_stream_of_unknown_length_is_uploaded(bucket):
    data = os.urandom((3 << 20) + 17)
    with bucket.blob("stream").open("wb", chunk_size=1 << 20) as file:
        for start in range(0, len(data), 100_000):
            file.write(data[start : start + 100_000])
    assert bucket.blob("stream").download_as_bytes() == data


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (0, 0, slice(0, 1)),
        (10, 19, slice(10, 20)),
        (990, 5000, slice(990, 1000)),
        (5, None, slice(5, None)),
    ],
)
def test_ranged_download_gives_exactly_the_range(bucket, start, end, expected):
    data = os.urandom(1000)
    bucket.blob("ranged").upload_from_string(data)
    assert bucket.blob("ranged").download_as_bytes(start=start, end=end) == data[expected]


def test_chunked_download_is_whole(bucket, tmp_path):
    data = os.urandom((2 << 20) + 5)
    bucket.blob("chunked").upload_from_string(data)
    bucket.blob("chunked", chunk_size=256 << 10).download_to_filename(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == data


def test_create_only_write_is_refused_when_the_object_exists(bucket):
    bucket.blob("once").upload_from_string(b"1", if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        bucket.blob("once").upload_from_string(b"2", if_generation_match=0)
    assert bucket.blob("once").download_as_bytes() == b"1"


def test_stale_writer_is_refused_by_every_kind_of_upload(bucket, tmp_path):
    blob = bucket.blob("contended")
    blob.upload_from_string(b"1")
    stale = blob.generation
    blob.upload_from_string(b"2", if_generation_match=stale)
    (tmp_path / "file").write_bytes(bytes(3 << 20))
    with pytest.raises(PreconditionFailed):
        bucket.blob("contended").upload_from_string(b"3", if_generation_match=stale)
    with pytest.raises(PreconditionFailed):
        bucket.blob("contended", chunk_size=1 << 20).upload_from_filename(
            tmp_path / "file", if_generation_match=stale
        )
    assert bucket.blob("contended").download_as_bytes() == b"2"


def test_condition_is_judged_when_a_resumable_upload_ends_not_when_it_begins(bucket):
    blob = bucket.blob("late", chunk_size=256 << 10)
    file = blob.open("wb", if_generation_match=0)
    file.write(bytes(600 << 10))
    bucket.blob("late").upload_from_string(b"first")
    with pytest.raises(storage.exceptions.InvalidResponse, match="412"):
        file.close()
    assert bucket.blob("late").download_as_bytes() == b"first"


def test_stale_delete_is_refused_and_a_current_one_deletes(bucket):
    blob = bucket.blob("doomed")
    blob.upload_from_string(b"1")
    stale = blob.generation
    blob.upload_from_string(b"2")
    with pytest.raises(PreconditionFailed):
        bucket.delete_blob("doomed", if_generation_match=stale)
    with pytest.raises(NotFound):
        bucket.delete_blob("doomed", generation=stale)
    bucket.delete_blob("doomed", if_generation_match=blob.generation)
    with pytest.raises(NotFound):
        bucket.delete_blob("doomed")


def test_reads_are_conditional_too(bucket):
    blob = bucket.blob("read")
    blob.upload_from_string(b"1")
    first = blob.generation
    blob.upload_from_string(b"2")
    assert blob.generation > first
    with pytest.raises(PreconditionFailed):
        bucket.blob("read").download_as_bytes(if_generation_match=first)
    with pytest.raises(NotModified):
        bucket.blob("read").reload(if_generation_not_match=blob.generation)
    with pytest.raises(NotFound):
        bucket.blob("read", generation=first).download_as_bytes()


def test_list_with_delimiter_and_pages_finds_each_name_once(bucket, client):
    names = [f"run/{step}/{part}" for step in range(5) for part in "abc"] + ["run/top", "other"]
    for name in names:
        bucket.blob(name).upload_from_string(b"")
    listed = client.list_blobs(bucket, prefix="run/", delimiter="/", page_size=2)
    pages = [[blob.name for blob in page] for page in listed.pages]
    assert [name for page in pages for name in page] == ["run/top"]
    assert len(pages) == 3
    assert listed.prefixes == {f"run/{step}/" for step in range(5)}
    every = [blob.name for blob in client.list_blobs(bucket, page_size=4)]
    assert every == sorted(names)
    middle = client.list_blobs(bucket, start_offset="run/1/b", end_offset="run/3/")
    assert [blob.name for blob in middle] == [
        "run/1/b", "run/1/c", "run/2/a", "run/2/b", "run/2/c"
    ]  # fmt: skip


def test_glob_stops_at_slashes_unless_doubled(bucket, client):
    for name in ("a/x.json", "a/b/x.json", "a/x.txt"):
        bucket.blob(name).upload_from_string(b"")

    def match(glob):
        return [blob.name for blob in client.list_blobs(bucket, match_glob=glob)]

    assert match("a/*.json") == ["a/x.json"]
    assert match("**.json") == ["a/b/x.json", "a/x.json"]
    assert match("a/x.{json,txt}") == ["a/x.json", "a/x.txt"]


def test_copy_and_rewrite_keep_bytes_and_metadata(bucket):
    blob = bucket.blob("source")
    blob.metadata = {"kind": "test"}
    blob.upload_from_string(b"payload", content_type="text/x-test")
    copied = bucket.copy_blob(blob, bucket, "copy", if_generation_match=0)
    copied.reload()
    assert (copied.metadata, copied.content_type) == ({"kind": "test"}, "text/x-test")
    token, done, total = bucket.blob("rewritten").rewrite(blob)
    assert (token, done, total) == (None, 7, 7)
    bucket.delete_blob("source")
    assert bucket.blob("copy").download_as_bytes() == b"payload"
    assert bucket.blob("rewritten").download_as_bytes() == b"payload"


def test_copy_of_a_stale_source_or_onto_an_existing_name_is_refused(bucket):
    blob = bucket.blob("source")
    blob.upload_from_string(b"1")
    stale = blob.generation
    blob.upload_from_string(b"2")
    bucket.copy_blob(blob, bucket, "taken")
    with pytest.raises(PreconditionFailed):
        bucket.copy_blob(blob, bucket, "copy", if_source_generation_match=stale)
    with pytest.raises(NotFound):
        bucket.copy_blob(blob, bucket, "copy", source_generation=stale)
    with pytest.raises(PreconditionFailed):
        bucket.copy_blob(blob, bucket, "taken", if_generation_match=0)


def test_move_renames_at_once(bucket):
    blob = bucket.blob("old")
    blob.upload_from_string(b"payload")
    moved = bucket.move_blob(blob, "new")
    assert moved.generation > blob.generation
    assert bucket.blob("new").download_as_bytes() == b"payload"
    assert bucket.get_blob("old") is None


def test_compose_concatenates_and_has_no_md5(bucket):
    parts = [os.urandom(size) for size in (10, 0, (1 << 20) + 3)]
    blobs = [bucket.blob(f"part-{index}") for index in range(3)]
    for blob, data in zip(blobs, parts, strict=True):
        blob.upload_from_string(data)
    whole = bucket.blob("whole")
    whole.compose(blobs)
    whole.reload()
    data = b"".join(parts)
    assert (whole.crc32c, whole.component_count, whole.md5_hash) == (crc32c(data), 3, None)
    assert whole.download_as_bytes() == data
    with pytest.raises(NotFound):
        bucket.blob("whole2").compose([bucket.blob("missing")])


def test_wrong_checksum_is_refused_and_stores_nothing(bucket):
    blob = bucket.blob("damaged")
    blob.md5_hash = base64.b64encode(bytes(16)).decode()
    with pytest.raises(BadRequest, match="MD5"):
        blob.upload_from_string(b"payload")
    assert bucket.get_blob("damaged") is None


def test_damaged_download_is_noticed_by_the_client(gcs, bucket):
    bucket.blob("damaged").upload_from_string(b"payload")
    gcs.file("damaged").write_bytes(b"paYload")
    with pytest.raises(storage.exceptions.DataCorruption):
        bucket.blob("damaged").download_as_bytes()


def test_patch_moves_the_metageneration_only(bucket):
    blob = bucket.blob("patched")
    blob.upload_from_string(b"payload")
    version = blob.generation
    blob.metadata = {"a": "1", "b": "2"}
    blob.patch(if_metageneration_match=1)
    blob.metadata = {"a": None}
    blob.patch()
    assert (blob.generation, blob.metageneration) == (version, 3)
    assert bucket.get_blob("patched").metadata == {"b": "2"}
    with pytest.raises(PreconditionFailed):
        blob.patch(if_metageneration_match=1)


def test_buckets_are_made_listed_changed_and_removed(client):
    made = client.create_bucket("made-by-client")
    assert client.get_bucket("made-by-client").name == "made-by-client"
    assert "made-by-client" in [bucket.name for bucket in client.list_buckets()]
    with pytest.raises(Conflict):
        client.create_bucket("made-by-client")
    made.labels = {"kind": "test"}
    made.patch()
    assert client.get_bucket("made-by-client").labels == {"kind": "test"}
    made.blob("object").upload_from_string(b"")
    with pytest.raises(Conflict):
        made.delete()
    made.delete(force=True)
    with pytest.raises(NotFound):
        client.get_bucket("made-by-client")
    with pytest.raises(NotFound):
        made.blob("object").upload_from_string(b"")
    with pytest.raises(BadRequest):
        client.create_bucket("Not-A-Name")
